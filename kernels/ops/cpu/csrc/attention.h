/* This file is what the parts of attention share: attend_plan.c cuts the work into pieces,
 * attention.c carries the softmax along the keys of a piece, attend_block.c computes 64 keys for one
 * tile.
 */
#ifndef HISTRIO_ATTENTION_H
#define HISTRIO_ATTENTION_H

#include "cpu.h"
#include <math.h>

#define KEYS 64            /* in a block */
#define SEGMENT 512        /* keys whose result is merged as one */
#define TILE_ROWS_MAX 192
#define GROUP 6            /* query rows multiplied together: 6 x 4 sums fill the registers */
#define SOFT 12            /* rows whose softmax is carried on together, at most 16 */

/* A few query tokens of one sequence, times the query heads of each kv head. */
typedef struct {
    int32_t row, token, tokens;
    int32_t segment_first, segment_count;
    int32_t heads_each;  /* kv heads that one piece computes */
    int64_t cost;        /* of a kv head: products, about */
    int64_t results;     /* of its segments: where in job->results; -1: all in one piece */
} tile_at;

/* Segment: counted from the tile's first. Of the kv heads from `head`. */
typedef struct { int32_t tile, segment, head; } piece_at;

typedef struct {
    const hs_heads *heads;
    const hs_batch *batch;
    const float *q;
    const void *k_pool, *v_pool;
    float *out;
    int64_t group, tile_tokens, tile_count, piece_count;
    const tile_at *tiles;
    const piece_at *pieces;   /* the longest first, so that the threads end together */
    uint8_t *scratch, *results;
    size_t scratch_bytes, results_bytes;
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
    float *scores;    /* [SOFT][KEYS], then weights [SOFT][keys or pairs of them] */
    const float *value_rows[KEYS];
} tile_state;

/* Online softmax: sum [rows][16] by lane, weighted values [rows][dim], maximum [rows]. Over bfloat16
 * scores and maxima are of base 2. */
typedef struct { float *sum, *values, *maximum; } partial;

/* Brings keys and values of [first + skip, first + count) to places [skip, count) of the block. */
void hs_block_load(tile_state *t, int64_t first, int64_t skip, int64_t count);
/* Takes the keys [first, first + count) that each row sees into its softmax and values. */
void hs_block_attend(tile_state *t, int64_t first, int64_t count, partial *p);

/* Fills in tiles and pieces and how large the results are. NO_MEMORY or OK. */
int hs_attend_plan(attend_job *job);

INLINE size_t partial_bytes(int64_t rows, int64_t dim) {
    return ((size_t)(rows * (dim + 17)) * 4 + 63) & ~(size_t)63;
}

/* e^x or, over bfloat16, 2^x; x <= 0. */
INLINE float power(const int bf16, float x) {
    __m512 wide = _mm512_set1_ps(x);
    return _mm512_cvtss_f32(bf16 ? exp2_ps(wide) : exp_ps(wide));
}

#endif
