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

/* Where this block's keys [skip, count) and the next block's begin in the pools. Beyond the last key
 * stands the last one again: the loads fetch the next block's rows into the cache along with this
 * one's, since pages are scattered and the processor's own prefetching sees no pattern. */
static void find_rows(const tile_state *t, int64_t first, int64_t skip, int64_t count,
                      int64_t *at) {
    const hs_batch *batch = t->job->batch;
    const int32_t *pages = batch->page_table + t->row * batch->pages_max;
    int64_t page_size = batch->page_size, row_len = t->job->heads->kv_heads * t->dim, start = 0;
    int64_t page = (first + skip) / page_size, within = (first + skip) % page_size, i = skip;
    int64_t last = max64(count, min64(2 * KEYS, t->position + t->tokens - first));
    for (; i < last; page++, within = 0) {
        start = ((int64_t)pages[page] * page_size + within) * row_len + t->kv_head * t->dim;
        for (int64_t end = min64(last, i + page_size - within); i < end; i++, start += row_len)
            at[i] = start;
    }
    for (; i < 2 * KEYS; i++) at[i] = start - row_len;
}

INLINE void load_float32(const int full, tile_state *t, int64_t first, int64_t skip,
                         int64_t count) {
    int64_t at[2 * KEYS], dim = t->dim;
    const float *k_pool = t->job->k_pool;
    find_rows(t, first, skip, count, at);
    for (int64_t base = skip & ~(int64_t)15; base < count; base += 16)
        for (int64_t d = 0; d < dim; d += 16) {
            __m512 r[16];
            for (int i = 0; i < 16; i++)
                _mm_prefetch((const char *)(k_pool + at[KEYS + base + i] + d), _MM_HINT_T0);
            for (int i = 0; i < 16; i++)
                r[i] = full || (base + i >= skip && base + i < count)
                           ? _mm512_loadu_ps(k_pool + at[base + i] + d) : _mm512_setzero_ps();
            transpose_16(r);
            for (int i = 0; i < 16; i++)
                _mm512_store_ps((float *)t->keys + (d + i) * KEYS + base, r[i]);
        }
    const float *v_pool = t->job->v_pool;
    for (int64_t i = skip; i < count; i++) {
        t->value_rows[i] = v_pool + at[i];
        for (int64_t d = 0; d < dim; d += 16)
            _mm_prefetch((const char *)(v_pool + at[KEYS + i] + d), _MM_HINT_T0);
    }
}

/* The same in pairs: of dimensions for keys, of keys for values. */
INLINE void load_bfloat16(const int full, tile_state *t, int64_t first, int64_t skip,
                          int64_t count) {
    int64_t at[2 * KEYS], dim = t->dim;
    const uint16_t *k_pool = t->job->k_pool, *v_pool = t->job->v_pool;
    find_rows(t, first, skip, count, at);
#define ROW(pool, key, mask) \
    (full || ((key) >= skip && (key) < count) ? _mm512_maskz_loadu_epi16(mask, (pool) + at[key] + d) \
                                              : _mm512_setzero_si512())
    for (int64_t d = 0; d < dim; d += 32) {
        __mmask32 mask = dim - d >= 32 ? 0xFFFFFFFF : 0xFFFF;
        for (int64_t base = skip & ~(int64_t)15; base < count; base += 16) {
            __m512 r[16];
            for (int i = 0; i < 16; i++)
                _mm_prefetch((const char *)(k_pool + at[KEYS + base + i] + d), _MM_HINT_T0);
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
            _mm_prefetch((const char *)(v_pool + at[KEYS + 2 * pair] + d), _MM_HINT_T0);
            _mm_prefetch((const char *)(v_pool + at[KEYS + 2 * pair + 1] + d), _MM_HINT_T0);
            __m512i even = ROW(v_pool, 2 * pair, mask), odd = ROW(v_pool, 2 * pair + 1, mask);
            _mm512_store_si512(to + d, _mm512_permutex2var_epi16(even, low, odd));
            if (mask != 0xFFFF)
                _mm512_store_si512(to + d + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
#undef ROW
}

void hs_block_load(tile_state *t, int64_t first, int64_t skip, int64_t count) {
    int full = skip == 0 && count == KEYS;
    if (t->bf16 && full) load_bfloat16(1, t, first, 0, KEYS);
    else if (t->bf16) load_bfloat16(0, t, first, skip, count);
    else if (full) load_float32(1, t, first, 0, KEYS);
    else load_float32(0, t, first, skip, count);
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

/* out[rows][vectors of dim] = out * alpha + weights of keys (or pairs) [from, to) times values. */
INLINE void weigh(const int bf16, const int rows, const int vectors, const float *weights,
                  const float *alpha, const float *const *value_rows, int64_t from, int64_t to,
                  int64_t d, int64_t dim, float *out) {
    __m512 acc[GROUP * 4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[r * vectors + v] = _mm512_mul_ps(_mm512_set1_ps(alpha[r]),
                                                 _mm512_loadu_ps(out + r * dim + d + v * 16));
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
        const float *weights, const float *alpha, const float *const *value_rows,         \
        int64_t from, int64_t to, int64_t d, int64_t dim, float *out) {                   \
        weigh(bf16, rows, vectors, weights, alpha, value_rows, from, to, d, dim, out);    \
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
static void (*const weigh_of[2][2][GROUP])(const float *, const float *, const float *const *,
                                           int64_t, int64_t, int64_t, int64_t, float *) = {
    {NAMES(weigh_0, 1), NAMES(weigh_0, 4)}, {NAMES(weigh_1, 1), NAMES(weigh_1, 4)}};

static void weigh_rows(const tile_state *t, int64_t rows, const float *weights, const float *alpha,
                       int64_t from, int64_t to, float *out) {
    int64_t d = 0, dim = t->dim;
    for (; d + 64 <= dim; d += 64)
        weigh_of[t->bf16][1][rows - 1](weights, alpha, t->value_rows, from, to, d, dim, out);
    for (; d < dim; d += 16)
        weigh_of[t->bf16][0][rows - 1](weights, alpha, t->value_rows, from, to, d, dim, out);
}

/* The keys of the block that each of a few rows sees, [low, high), none where low >= high. */
typedef struct {
    int64_t low[SOFT], high[SOFT];
    int64_t low_all, high_all;   /* seen by all rows, if low_all < high_all */
    int64_t low_any, high_any;   /* seen by any row, if low_any < high_any */
} sight;

static void find_sight(const tile_state *t, int64_t row, int64_t rows, int64_t first,
                       int64_t count, sight *s) {
    int64_t position = t->position + row / t->group, head = row % t->group;
    s->low_all = s->high_any = 0;
    s->high_all = s->low_any = KEYS;
    for (int64_t r = 0; r < rows; r++, head++) {
        if (head == t->group) { head = 0; position++; }
        int64_t low = t->window ? max64(0, position - t->window + 1 - first) : 0;
        int64_t high = max64(low, min64(count, position + 1 - first));
        s->low[r] = low;
        s->high[r] = high;
        s->low_all = max64(s->low_all, low);
        s->high_all = min64(s->high_all, high);
        if (low == high) continue;
        s->low_any = min64(s->low_any, low);
        s->high_any = max64(s->high_any, high);
    }
}

INLINE __mmask16 seen(const int full, const sight *s, int64_t r, int v) {
    if (full) return 0xFFFF;
    return (__mmask16)(tail_mask(max64(0, s->high[r] - v * 16))
                       & ~tail_mask(max64(0, s->low[r] - v * 16)));
}

/* Scores of a few rows to weights of the keys that they see (`full`: all of the block). Carries
 * their maxima and sums along; alpha: by what their earlier values are to be scaled. */
INLINE void soften(const int bf16, const int full, float *scores, const sight *s, int64_t rows,
                   float *maximum, float *sum, float *alpha) {
    __m512 top[16];
    float peak[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) top[r] = _mm512_set1_ps(-INFINITY);
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            top[r] = _mm512_mask_max_ps(top[r], seen(full, s, r, v), top[r],
                                        _mm512_loadu_ps(scores + r * KEYS + v * 16));
    transpose_16(top);
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int r = 0; r < half; r++) top[r] = _mm512_max_ps(top[r], top[r + half]);
    __mmask16 in = tail_mask(rows);
    __m512 before = _mm512_maskz_loadu_ps(in, maximum);
    __m512 now = _mm512_mask_max_ps(before, in, top[0], before);
    __m512 fall = _mm512_maskz_sub_ps(_mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ), before, now);
    _mm512_mask_storeu_ps(maximum, in, now);
    _mm512_storeu_ps(peak, now);
    _mm512_storeu_ps(alpha, bf16 ? exp2_ps(fall) : exp_ps(fall));
    for (int64_t r = 0; r < rows; r++) {
        __m512 shift = _mm512_set1_ps(peak[r]), total = _mm512_loadu_ps(sum + r * 16);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m512 e = _mm512_sub_ps(_mm512_loadu_ps(scores + r * KEYS + v * 16), shift);
            e = _mm512_maskz_mov_ps(seen(full, s, r, v), bf16 ? exp2_ps(e) : exp_ps(e));
            /* Said in one: whether a compiler does it itself must not differ between the forms. */
            total = v == 0 ? _mm512_fmadd_ps(total, _mm512_set1_ps(alpha[r]), e)
                           : _mm512_add_ps(total, e);
            if (!bf16) _mm512_storeu_ps(scores + r * KEYS + v * 16, e);
            else _mm256_storeu_si256((__m256i *)(scores + r * KEYS + v * 8), f32_to_bf16(e));
        }
        _mm512_storeu_ps(sum + r * 16, total);
    }
}

static void soften_rows(const tile_state *t, const sight *s, int64_t rows, float *maximum,
                        float *sum, float *alpha) {
    int full = s->low_all == 0 && s->high_all == KEYS;
    if (t->bf16 && full) soften(1, 1, t->scores, s, rows, maximum, sum, alpha);
    else if (t->bf16) soften(1, 0, t->scores, s, rows, maximum, sum, alpha);
    else if (full) soften(0, 1, t->scores, s, rows, maximum, sum, alpha);
    else soften(0, 0, t->scores, s, rows, maximum, sum, alpha);
}

/* Adds the weighted values of `rows` <= GROUP rows from `row` of those in sight. A key that a row may
 * not see is not multiplied with a weight of zero: it may be NaN. */
static void weigh_seen(const tile_state *t, const sight *s, int64_t row, int64_t rows,
                       const float *alpha, float *values) {
    static const float ones[GROUP] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
    const float *weights = t->scores + row * KEYS;
    int64_t low = s->low_all, high = s->high_all;
    if (low == 0 && high == s->high_any) {
        weigh_rows(t, rows, weights, alpha, 0, high, values);
        return;
    }
    for (int64_t r = 0; r < rows; r++) { /* what only some see row by row, in the same order */
        int64_t last = low < high ? low : s->high[row + r];
        weigh_rows(t, 1, weights + r * KEYS, alpha + r, s->low[row + r], last, values + r * t->dim);
    }
    if (low >= high) return;
    weigh_rows(t, rows, weights, ones, low, high, values);
    for (int64_t r = 0; r < rows; r++)
        if (s->high[row + r] > high)
            weigh_rows(t, 1, weights + r * KEYS, ones, high, s->high[row + r], values + r * t->dim);
}

/* SOFT rows at a time: enough to hide how long it takes to find their maxima. */
void hs_block_attend(tile_state *t, int64_t first, int64_t count, partial *p) {
    for (int64_t row = 0; row < t->rows; row += SOFT) {
        int64_t rows = min64(SOFT, t->rows - row);
        float alpha[16];
        sight s;
        find_sight(t, row, rows, first, count, &s);
        if (s.low_any >= s.high_any) continue;
        int width = s.high_any > 32 ? 2 : s.high_any > 16 ? 1 : 0;
        for (int64_t r = 0; r < rows; r += GROUP)
            scores_of[t->bf16][width][min64(GROUP, rows - r) - 1](
                t->q + (row + r) * t->steps, t->keys, t->steps, t->scores + r * KEYS);
        soften_rows(t, &s, rows, p->maximum + row, p->sum + row * 16, alpha);
        for (int64_t r = 0; r < rows; r += GROUP) {
            int64_t few = min64(GROUP, rows - r);
            float *values = p->values + (row + r) * t->dim;
            if (t->bf16) /* the weights of unseen keys are zero, the keys are the sequence's own */
                weigh_rows(t, few, t->scores + r * KEYS, alpha + r, s.low_any / 2,
                           (s.high_any + 1) / 2, values);
            else
                weigh_seen(t, &s, r, few, alpha + r, values);
        }
    }
}
