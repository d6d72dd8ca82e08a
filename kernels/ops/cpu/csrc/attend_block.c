/* This file computes one block of 64 keys for a tile of query rows: loading through the page table,
 * scores, softmax weights, weighted values. Over a float32 pool all in float32; over a bfloat16
 * pool in pairs of bfloat16 (vdpbf16ps), summed in float32.
 */
#include "attention.h"

INLINE void transpose_16(__m512 *r) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

/* Where keys [first + skip, first + count) begin in the pools, and the next block's into the cache:
 * pages are scattered, so that the processor's own prefetching sees no pattern. */
static void find_rows(const tile_state *t, int64_t first, int64_t skip, int64_t count,
                      int64_t *at) {
    const hs_batch *batch = t->job->batch;
    const int32_t *pages = batch->page_table + t->row * batch->pages_max;
    int64_t page_size = batch->page_size, element = t->job->heads->pool_bf16 ? 2 : 4;
    int64_t page = (first + skip) / page_size, within = (first + skip) % page_size;
    int64_t ahead = min64(first + KEYS + count, t->position + t->tokens) - first;
    for (int64_t i = skip; i < ahead; i++) {
        int64_t row = (int64_t)pages[page] * page_size + within;
        int64_t start = (row * t->job->heads->kv_heads + t->kv_head) * t->dim;
        const char *fetched = i < count ? t->job->v_pool : t->job->k_pool;
        for (int64_t byte = 0; byte < t->dim * element; byte += 64)
            _mm_prefetch(fetched + start * element + byte, _MM_HINT_T0);
        if (i < count) at[i] = start;
        if (++within == page_size) { within = 0; page++; }
    }
}

static void load_float32(tile_state *t, int64_t first, int64_t skip, int64_t count) {
    int64_t at[KEYS], dim = t->dim;
    const float *k_pool = t->job->k_pool;
    find_rows(t, first, skip, count, at);
    for (int64_t base = skip & ~(int64_t)15; base < count; base += 16)
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 r[16];
            for (int i = 0; i < 16; i++)
                r[i] = base + i >= skip && base + i < count
                           ? _mm512_loadu_ps(k_pool + at[base + i] + d) : _mm512_setzero_ps();
            transpose_16(r);
            for (int i = 0; i < 16; i++)
                _mm512_store_ps((float *)t->keys + (d + i) * KEYS + base, r[i]);
        }
    for (int64_t i = skip; i < count; i++)
        t->value_rows[i] = (const float *)t->job->v_pool + at[i];
}

/* The same in pairs: of dimensions for keys, of keys for values. */
static void load_bfloat16(tile_state *t, int64_t first, int64_t skip, int64_t count) {
    int64_t at[KEYS], dim = t->dim;
    const uint16_t *k_pool = t->job->k_pool, *v_pool = t->job->v_pool;
    find_rows(t, first, skip, count, at);
#define ROW(pool, key, mask) \
    ((key) >= skip && (key) < count ? _mm512_maskz_loadu_epi16(mask, (pool) + at[key] + d) \
                                    : _mm512_setzero_si512())
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0xFFFF;
        for (int64_t base = skip & ~(int64_t)15; base < count; base += 16) {
            __m512 r[16];
            for (int i = 0; i < 16; i++) r[i] = _mm512_castsi512_ps(ROW(k_pool, base + i, mask));
            transpose_16(r);
            for (int i = 0; i < (mask == 0xFFFF ? 8 : 16); i++)
                _mm512_store_ps((float *)t->keys + (d / 2 + i) * KEYS + base, r[i]);
        }
    }
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                   7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t pair = skip / 2; pair < (count + 1) / 2; pair++) {
        uint32_t *to = (uint32_t *)t->values + pair * dim;
        t->value_rows[pair] = (const float *)to;
        for (int64_t d = 0; d < dim; d += 32) {
            __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0xFFFF;
            __m512i even = ROW(v_pool, 2 * pair, mask), odd = ROW(v_pool, 2 * pair + 1, mask);
            _mm512_store_si512(to + d, _mm512_permutex2var_epi16(even, low, odd));
            if (mask != 0xFFFF)
                _mm512_store_si512(to + d + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
#undef ROW
}

void hs_block_load(tile_state *t, int64_t first, int64_t skip, int64_t count) {
    (t->bf16 ? load_bfloat16 : load_float32)(t, first, skip, count);
}

/* acc + a * b, of floats or of pairs of bfloat16: 4 bytes either way. */
INLINE __m512 multiply_add(const int bf16, __m512 acc, const void *a, __m512 b) {
    int32_t bits;
    memcpy(&bits, a, 4);
    __m512i wide = _mm512_set1_epi32(bits);
    if (bf16) return dot_pairs(acc, wide, _mm512_castps_si512(b));
    return _mm512_fmadd_ps(_mm512_castsi512_ps(wide), b, acc);
}

/* scores[rows][16 * vectors] = q . keys, one chain over dim for each; q is [steps][GROUP]. */
INLINE void score(const int bf16, const int rows, const int vectors, const float *q,
                  const float *keys, int64_t steps, float *scores) {
    __m512 acc[GROUP * 4];
#pragma GCC unroll 24
    for (int i = 0; i < rows * vectors; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < steps; d++) {
        __m512 k[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) k[v] = _mm512_load_ps(keys + d * KEYS + v * 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                acc[r * vectors + v] =
                    multiply_add(bf16, acc[r * vectors + v], q + d * GROUP + r, k[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            _mm512_store_ps(scores + r * KEYS + v * 16, acc[r * vectors + v]);
}

/* values[rows][vectors of dim] += weights of keys (or pairs) [from, to) times their values. */
INLINE void weigh(const int bf16, const int rows, const int vectors, const float *weights,
                  const float *const *value_rows, int64_t from, int64_t to, int64_t d, int64_t dim,
                  float *out) {
    __m512 acc[GROUP * 4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[r * vectors + v] = _mm512_loadu_ps(out + r * dim + d + v * 16);
    for (int64_t key = from; key < to; key++) {
        __m512 value[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            value[v] = _mm512_loadu_ps(value_rows[key] + d + v * 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                acc[r * vectors + v] =
                    multiply_add(bf16, acc[r * vectors + v], weights + r * KEYS + key, value[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(out + r * dim + d + v * 16, acc[r * vectors + v]);
}

#define SCORE(bf16, rows, vectors)                                                        \
    static __attribute__((noinline)) void score_##bf16##_##rows##_##vectors(              \
        const float *q, const float *keys, int64_t steps, float *scores) {                \
        score(bf16, rows, vectors, q, keys, steps, scores);                               \
    }
#define WEIGH(bf16, rows, vectors)                                                        \
    static __attribute__((noinline)) void weigh_##bf16##_##rows##_##vectors(              \
        const float *weights, const float *const *value_rows, int64_t from, int64_t to,   \
        int64_t d, int64_t dim, float *out) {                                             \
        weigh(bf16, rows, vectors, weights, value_rows, from, to, d, dim, out);           \
    }
#define EACH(M, bf16, vectors)                                                            \
    M(bf16, 1, vectors) M(bf16, 2, vectors) M(bf16, 3, vectors)                           \
    M(bf16, 4, vectors) M(bf16, 5, vectors) M(bf16, 6, vectors)
#define BOTH(M, vectors) EACH(M, 0, vectors) EACH(M, 1, vectors)
BOTH(SCORE, 1)
BOTH(SCORE, 2)
BOTH(SCORE, 4)
BOTH(WEIGH, 1)
BOTH(WEIGH, 4)
#define NAMES(name, vectors)                                                   \
    {name##_1_##vectors, name##_2_##vectors, name##_3_##vectors,               \
     name##_4_##vectors, name##_5_##vectors, name##_6_##vectors}
static void (*const scores_of[2][3][GROUP])(const float *, const float *, int64_t, float *) = {
    {NAMES(score_0, 1), NAMES(score_0, 2), NAMES(score_0, 4)},
    {NAMES(score_1, 1), NAMES(score_1, 2), NAMES(score_1, 4)}};
static void (*const weigh_of[2][2][GROUP])(const float *, const float *const *, int64_t, int64_t,
                                           int64_t, int64_t, float *) = {
    {NAMES(weigh_0, 1), NAMES(weigh_0, 4)}, {NAMES(weigh_1, 1), NAMES(weigh_1, 4)}};

static void weigh_rows(const tile_state *t, int64_t rows, const float *weights, int64_t from,
                       int64_t to, float *out) {
    int64_t d = 0, dim = t->dim;
    if (from >= to) return;
    for (; d + 64 <= dim; d += 64)
        weigh_of[t->bf16][1][rows - 1](weights, t->value_rows, from, to, d, dim, out);
    for (; d < dim; d += 16)
        weigh_of[t->bf16][0][rows - 1](weights, t->value_rows, from, to, d, dim, out);
}

/* Scores of one row to weights; returns by what the earlier sum and values are to be scaled. */
INLINE float soften(const int bf16, float *scores, int64_t low, int64_t high, float *maximum,
                    float *sum) {
    __m512 s[4], top = _mm512_set1_ps(-INFINITY);
    __mmask16 seen[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        __mmask16 before_low = tail_mask(max64(0, low - v * 16));
        seen[v] = (__mmask16)(tail_mask(max64(0, high - v * 16)) & ~before_low);
        s[v] = _mm512_maskz_loadu_ps(seen[v], scores + v * 16);
        top = _mm512_mask_max_ps(top, seen[v], top, s[v]);
    }
    float before = *maximum, now = fmaxf(before, _mm512_reduce_max_ps(top));
    __m512 shift = _mm512_set1_ps(now), total = _mm512_loadu_ps(sum);
    float alpha = 1.f;
    if (now != before) {
        alpha = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(before - now)));
        total = _mm512_mul_ps(total, _mm512_set1_ps(alpha));
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        __m512 e = _mm512_maskz_mov_ps(seen[v], exp_ps(_mm512_sub_ps(s[v], shift)));
        s[v] = e;
        total = _mm512_add_ps(total, e);
        if (!bf16) _mm512_storeu_ps(scores + v * 16, e);
    }
    if (bf16) {
        for (int v = 0; v < 4; v++)
            _mm256_storeu_si256((__m256i *)(scores + v * 8), f32_to_bf16(s[v]));
    }
    _mm512_storeu_ps(sum, total);
    *maximum = now;
    return alpha;
}

void hs_block_scores(tile_state *t, int64_t count) {
    int width = count > 32 ? 2 : count > 16 ? 1 : 0;
    for (int64_t r = 0; r < t->rows; r += GROUP)
        scores_of[t->bf16][width][min64(GROUP, t->rows - r) - 1](
            t->q + r * t->steps, t->keys, t->steps, t->scores + r * KEYS);
}

void hs_block_values(tile_state *t, partial *p) {
    int64_t dim = t->dim;
    for (int64_t r = 0; r < t->rows; r += GROUP) {
        int64_t rows = min64(GROUP, t->rows - r), low = 0, high = KEYS, least = KEYS, most = 0;
        float *weights = t->scores + r * KEYS, *values = p->values + r * dim;
        for (int64_t i = 0; i < rows; i++) {
            low = max64(low, t->low[r + i]);
            high = min64(high, t->high[r + i]);
            if (t->low[r + i] < t->high[r + i]) {
                least = min64(least, t->low[r + i]);
                most = max64(most, t->high[r + i]);
            }
            float alpha = t->alpha[r + i];
            if (alpha != 1.f)
                for (int64_t d = 0; d < dim; d++) values[i * dim + d] *= alpha;
        }
        if (t->bf16) { /* the weights of unseen keys are zero, the keys are the sequence's own */
            weigh_rows(t, rows, weights, least / 2, (most + 1) / 2, values);
            continue;
        }
        if (low >= high) { /* no key that all see: each row by itself, in the same order */
            for (int64_t i = 0; i < rows; i++)
                weigh_rows(t, 1, weights + i * KEYS, t->low[r + i], t->high[r + i],
                           values + i * dim);
            continue;
        }
        for (int64_t i = 0; i < rows; i++)
            weigh_rows(t, 1, weights + i * KEYS, t->low[r + i], low, values + i * dim);
        weigh_rows(t, rows, weights, low, high, values);
        for (int64_t i = 0; i < rows; i++)
            weigh_rows(t, 1, weights + i * KEYS, high, t->high[r + i], values + i * dim);
    }
}

void hs_block_soften(tile_state *t, int64_t row, int64_t low, int64_t high, partial *p) {
    float *scores = t->scores + row * KEYS, *maximum = p->maximum + row, *sum = p->sum + row * 16;
    t->low[row] = t->high[row] = 0;
    t->alpha[row] = 1.f;
    if (low >= high) {
        memset(scores, 0, KEYS * 4);
        return;
    }
    t->low[row] = (int16_t)low;
    t->high[row] = (int16_t)high;
    t->alpha[row] = t->bf16 ? soften(1, scores, low, high, maximum, sum)
                            : soften(0, scores, low, high, maximum, sum);
}
