/* This file is what the two halves of attention share: attention.c cuts the work into pieces and
 * carries the softmax along, attend_block.c computes 64 keys for one tile.
 */
#ifndef HISTRIO_ATTENTION_H
#define HISTRIO_ATTENTION_H

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

/* Brings keys and values of [first + skip, first + count) to places [skip, count) of the block. */
void hs_block_load(tile_state *t, int64_t first, int64_t skip, int64_t count);
/* Scores of all rows with the keys in place, before masks. */
void hs_block_scores(tile_state *t, int64_t count);
/* Scores of `row` to weights of the keys [low, high) that it sees (none if low >= high); carries
 * the row's maximum and sum along and notes by what its values are to be scaled. */
void hs_block_soften(tile_state *t, int64_t row, int64_t low, int64_t high, partial *p);
/* Adds the weighted values of the block to those of p. */
void hs_block_values(tile_state *t, partial *p);

#endif
