/* This file attends over paged keys and values: decode rows and prefill chunks by one routine.
 *
 * A tile is a few query tokens of one sequence times the query heads of one kv head. For each 64
 * keys (absolute positions [64 i, 64 i + 64)) the keys are transposed once, so that scores need no
 * sum across lanes, and the softmax is carried on online. Eight such blocks make a segment, whose
 * result (maximum, sum, weighted values) is merged into the tile's: where tiles are fewer than
 * threads want (decode over long contexts), the segments are shared out as well.
 *
 * Laws: the order of reduction is fixed by absolute key positions, head_dim and nothing else, so a
 * result has the same bits in a prefill chunk, in decode, and with any page size. Over a float32
 * pool a key that a query may not see is neither multiplied nor added: it may be NaN. Over a
 * bfloat16 pool, where q and the softmax's weights are rounded to pairs of bfloat16 as well, that
 * holds for pages that aren't the sequence's.
 */
#include "cpu.h"
#include <math.h>

#define KEYS 64            /* in a block */
#define SEGMENT 512        /* keys whose result is merged as one */
#define TILE_ROWS_MAX 48
#define GROUP 6            /* query rows multiplied together: 6 x 4 sums fill the registers */

typedef struct { int32_t row, token; } tile_at;

typedef struct {
    const hs_heads *heads;
    const hs_batch *batch;
    const float *q;
    const void *k_pool, *v_pool;
    float *out;
    const tile_at *tiles;
    int64_t tile_count, tile_tokens, segments;   /* segments: pieces that one tile is cut into */
    uint8_t *scratch;
    size_t scratch_bytes, result_bytes;
    uint8_t *results;
} attend_job;

/* What a tile works on; all arrays but q and the result belong to the thread. */
typedef struct {
    const attend_job *job;
    int64_t kv_head, row, tokens, group, rows, position;  /* position: of the first token */
    int64_t dim, window;
    int bf16;         /* pairs of bfloat16 wherever these arrays say pair, otherwise float32 */
    int64_t steps;    /* dim, or pairs of it */
    float *q;         /* [rows / GROUP][steps][GROUP], scaled */
    float *keys;      /* [steps][KEYS] */
    float *values;    /* [pairs of keys][dim]; float32 values stay in the pool */
    float *scores;    /* [rows][KEYS], then weights [rows][keys or pairs of them] */
    float *alpha;     /* [rows] */
    const float *value_rows[KEYS];
    int16_t low[TILE_ROWS_MAX], high[TILE_ROWS_MAX]; /* keys of the block that each row sees */
} tile_state;

/* Online softmax: maximum [rows], sum [rows][16] by lane, weighted values [rows][dim]. */
typedef struct { float *maximum, *sum, *values; } partial;

static partial partial_at(uint8_t *memory, int64_t rows) {
    float *p = (float *)memory;
    return (partial){p, p + TILE_ROWS_MAX, p + TILE_ROWS_MAX + rows * 16};
}

static size_t partial_bytes(int64_t rows, int64_t dim) {
    return (size_t)(TILE_ROWS_MAX + rows * (16 + dim)) * 4 + 64;
}

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

/* Brings keys and values of [first + skip, first + count) to places [skip, count) of the block. */
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

/* acc + a * b, of floats or of pairs of bfloat16: 4 bytes either way. */
INLINE __m512 multiply_add(const int bf16, __m512 acc, const void *a, __m512 b) {
    int32_t bits;
    memcpy(&bits, a, 4);
    __m512i wide = _mm512_set1_epi32(bits);
    if (bf16) return _mm512_dpbf16_ps(acc, (__m512bh)wide, (__m512bh)_mm512_castps_si512(b));
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
INLINE float soften(const int bf16, float *scores, int64_t low, int64_t high, float *maximum, float *sum) {
    __m512 s[4], top = _mm512_set1_ps(-INFINITY);
    __mmask16 seen[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        seen[v] = tail_mask(max64(0, high - v * 16)) & (__mmask16)~tail_mask(max64(0, low - v * 16));
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
        _mm512_storeu_si512(scores, (__m512i)_mm512_cvtne2ps_pbh(s[1], s[0]));
        _mm512_storeu_si512(scores + 16, (__m512i)_mm512_cvtne2ps_pbh(s[3], s[2]));
    }
    _mm512_storeu_ps(sum, total);
    *maximum = now;
    return alpha;
}

static void block_scores(tile_state *t, int64_t count) {
    int width = count > 32 ? 2 : count > 16 ? 1 : 0;
    for (int64_t r = 0; r < t->rows; r += GROUP)
        scores_of[t->bf16][width][min64(GROUP, t->rows - r) - 1](
            t->q + r * t->steps, t->keys, t->steps, t->scores + r * KEYS);
}

static void block_values(tile_state *t, partial *p) {
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

/* The online softmax over the keys of one segment. */
static void segment(tile_state *t, int64_t index, partial *p) {
    int64_t key_last = min64(t->position + t->tokens, (index + 1) * SEGMENT);
    int64_t key_first = t->window ? max64(0, t->position - t->window + 1) : 0;
    for (int64_t r = 0; r < t->rows; r++) p->maximum[r] = -INFINITY;
    memset(p->sum, 0, (size_t)(t->rows * 16) * 4);
    memset(p->values, 0, (size_t)(t->rows * t->dim) * 4);
    for (int64_t first = index * SEGMENT; first < key_last; first += KEYS) {
        if (first + KEYS <= key_first) continue;
        /* Keys before every row's window may be in pages that are no longer the sequence's. */
        int64_t count = min64(KEYS, key_last - first), skip = max64(0, key_first - first);
        (t->bf16 ? load_bfloat16 : load_float32)(t, first, skip, count);
        block_scores(t, count);
        for (int64_t r = 0; r < t->rows; r++) {
            int64_t position = t->position + r / t->group;
            int64_t low = t->window ? max64(0, position - t->window + 1 - first) : 0;
            int64_t high = min64(count, position + 1 - first);
            t->alpha[r] = 1.f;
            t->low[r] = t->high[r] = 0;
            if (low >= high) { /* all of the block is out of this row's sight */
                memset(t->scores + r * KEYS, 0, KEYS * 4);
                continue;
            }
            t->low[r] = (int16_t)low;
            t->high[r] = (int16_t)high;
            float *scores = t->scores + r * KEYS;
            t->alpha[r] = t->bf16 ? soften(1, scores, low, high, p->maximum + r, p->sum + r * 16)
                                  : soften(0, scores, low, high, p->maximum + r, p->sum + r * 16);
        }
        block_values(t, p);
    }
}

/* total = total merged with p, whose keys come after; the first one is taken as it is. */
static void merge(partial *total, const partial *p, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        float a = total->maximum[r], b = p->maximum[r], top = fmaxf(a, b);
        if (b == -INFINITY) continue;
        float scale_a = 0.f, scale_b = 1.f;
        if (a != -INFINITY) {
            scale_a = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(a - top)));
            scale_b = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(b - top)));
        }
        total->maximum[r] = top;
        for (int pass = 0; pass < 2; pass++) {
            int64_t n = pass ? dim : 16;
            float *to = pass ? total->values + r * dim : total->sum + r * 16;
            const float *from = pass ? p->values + r * dim : p->sum + r * 16;
            for (int64_t i = 0; i < n; i += 16) {
                __m512 merged = _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(scale_b));
                merged = _mm512_fmadd_ps(_mm512_loadu_ps(to + i), _mm512_set1_ps(scale_a), merged);
                _mm512_storeu_ps(to + i, merged);
            }
        }
    }
}

static void write_tile(const tile_state *t, const partial *p) {
    const hs_heads *heads = t->job->heads;
    int64_t token = t->job->batch->query_start[t->row] + t->position
                    - (t->job->batch->kv_len[t->row] - t->job->batch->query_len[t->row]);
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t head = t->kv_head * t->group + r % t->group;
        float *out = t->job->out + ((token + r / t->group) * heads->query_heads + head) * t->dim;
        __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_loadu_ps(p->sum + r * 16)));
        for (int64_t d = 0; d < t->dim; d += 16)
            _mm512_storeu_ps(out + d, _mm512_div_ps(_mm512_loadu_ps(p->values + r * t->dim + d), sum));
    }
}

/* Places the arrays of tile `index` (of all kv heads) in `scratch`; two results follow them. */
static uint8_t *open_tile(tile_state *t, const attend_job *job, int64_t index, uint8_t *scratch) {
    const hs_heads *heads = job->heads;
    tile_at at = job->tiles[index / heads->kv_heads];
    t->job = job;
    t->kv_head = index % heads->kv_heads;
    t->row = at.row;
    t->group = heads->query_heads / heads->kv_heads;
    t->tokens = min64(job->tile_tokens, job->batch->query_len[at.row] - at.token);
    t->rows = t->tokens * t->group;
    t->position = job->batch->kv_len[at.row] - job->batch->query_len[at.row] + at.token;
    t->dim = heads->head_dim;
    t->window = heads->window;
    t->bf16 = heads->pool_bf16 != 0;
    t->steps = t->bf16 ? t->dim / 2 : t->dim;
    t->q = (float *)scratch;
    t->keys = t->q + (TILE_ROWS_MAX + GROUP) * t->dim;
    t->values = t->keys + t->dim * KEYS;
    t->scores = t->values + t->dim * KEYS;
    t->alpha = t->scores + TILE_ROWS_MAX * KEYS;
    return (uint8_t *)(t->alpha + TILE_ROWS_MAX);
}

static size_t tile_bytes(int64_t dim) {
    return (size_t)((TILE_ROWS_MAX + GROUP) * dim + 2 * dim * KEYS + TILE_ROWS_MAX * (KEYS + 1)) * 4;
}

static void load_queries(tile_state *t) {
    const hs_heads *heads = t->job->heads;
    int64_t token = t->job->batch->query_start[t->row] + t->position
                    - (t->job->batch->kv_len[t->row] - t->job->batch->query_len[t->row]);
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t head = t->kv_head * t->group + r % t->group;
        const float *q = t->job->q + ((token + r / t->group) * heads->query_heads + head) * t->dim;
        float *to = t->q + r / GROUP * GROUP * t->steps + r % GROUP;
        for (int64_t d = 0; d < t->dim; d += 16) {
            float part[16];
            __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(heads->scale));
            if (t->bf16) _mm256_storeu_si256((__m256i *)part, f32_to_bf16(scaled));
            else _mm512_storeu_ps(part, scaled);
            int64_t first = t->bf16 ? d / 2 : d, count = t->bf16 ? 8 : 16;
            for (int64_t i = 0; i < count; i++) to[(first + i) * GROUP] = part[i];
        }
    }
}

static int64_t segment_first(const tile_state *t) {
    return t->window ? max64(0, t->position - t->window + 1) / SEGMENT : 0;
}

static int64_t segment_last(const tile_state *t) {
    return ceil_div(t->position + t->tokens, SEGMENT);
}

/* A tile with all its segments. */
static void whole_piece(void *argument, int64_t index, int worker) {
    const attend_job *job = argument;
    tile_state t;
    uint8_t *rest = open_tile(&t, job, index, job->scratch + (size_t)worker * job->scratch_bytes);
    partial total = partial_at(rest, t.rows), part = partial_at(rest + job->result_bytes, t.rows);
    load_queries(&t);
    int64_t first = segment_first(&t), last = segment_last(&t);
    segment(&t, first, &total);
    for (int64_t i = first + 1; i < last; i++) {
        segment(&t, i, &part);
        merge(&total, &part, t.rows, t.dim);
    }
    write_tile(&t, &total);
}

/* One segment of a tile; its result waits in job->results. */
static void segment_piece(void *argument, int64_t index, int worker) {
    const attend_job *job = argument;
    tile_state t;
    open_tile(&t, job, index / job->segments,
              job->scratch + (size_t)worker * job->scratch_bytes);
    int64_t i = segment_first(&t) + index % job->segments;
    if (i >= segment_last(&t)) return;
    partial part = partial_at(job->results + (size_t)index * job->result_bytes, t.rows);
    load_queries(&t);
    segment(&t, i, &part);
}

static void merge_piece(void *argument, int64_t index, int worker) {
    const attend_job *job = argument;
    tile_state t;
    open_tile(&t, job, index, job->scratch + (size_t)worker * job->scratch_bytes);
    uint8_t *results = job->results + (size_t)(index * job->segments) * job->result_bytes;
    partial total = partial_at(results, t.rows);
    for (int64_t i = 1; segment_first(&t) + i < segment_last(&t); i++) {
        partial part = partial_at(results + (size_t)i * job->result_bytes, t.rows);
        merge(&total, &part, t.rows, t.dim);
    }
    write_tile(&t, &total);
}

/* The longest tiles first, so that the threads end together. */
static void list_tiles(const hs_batch *batch, int64_t tile_tokens, tile_at *tiles) {
    for (int64_t row = 0; row < batch->rows; row++)
        for (int64_t i = ceil_div(batch->query_len[row], tile_tokens) - 1; i >= 0; i--)
            *tiles++ = (tile_at){(int32_t)row, (int32_t)(i * tile_tokens)};
}

EXPORT int hs_attend(const hs_heads *heads, const hs_batch *batch, const float *q,
                     const void *k_pool, const void *v_pool, float *out) {
    int64_t group = heads->query_heads / heads->kv_heads, dim = heads->head_dim;
    if (group > TILE_ROWS_MAX || dim % 16 || group * heads->kv_heads != heads->query_heads)
        return BAD_ARGUMENT;
    attend_job job = {.heads = heads, .batch = batch, .q = q, .k_pool = k_pool, .v_pool = v_pool,
                      .out = out, .tile_tokens = TILE_ROWS_MAX / group, .segments = 1};
    for (int64_t row = 0; row < batch->rows; row++) {
        job.tile_count += ceil_div(batch->query_len[row], job.tile_tokens);
        job.segments = max64(job.segments, ceil_div(batch->kv_len[row], SEGMENT));
    }
    int64_t threads = hs_thread_count(), pieces = job.tile_count * heads->kv_heads;
    if (pieces >= 4 * threads || threads == 1) job.segments = 1;
    job.result_bytes = (partial_bytes(TILE_ROWS_MAX, dim) + 63) & ~(size_t)63;
    job.scratch_bytes = (tile_bytes(dim) + 2 * job.result_bytes + 4095) & ~(size_t)4095;
    size_t list_bytes = ((size_t)job.tile_count * sizeof(tile_at) + 4095) & ~(size_t)4095;
    size_t results = job.segments > 1 ? (size_t)(pieces * job.segments) * job.result_bytes : 0;
    uint8_t *space = hs_workspace(SPACE_ATTENTION,
                                  list_bytes + (size_t)threads * job.scratch_bytes + results);
    if (!space) return NO_MEMORY;
    list_tiles(batch, job.tile_tokens, (tile_at *)space);
    job.tiles = (const tile_at *)space;
    job.scratch = space + list_bytes;
    job.results = job.scratch + (size_t)threads * job.scratch_bytes;
    if (job.segments == 1) {
        hs_parallel(whole_piece, &job, pieces);
    } else {
        hs_parallel(segment_piece, &job, pieces * job.segments);
        hs_parallel(merge_piece, &job, pieces);
    }
    return OK;
}
