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
#include "attention.h"

static partial partial_at(uint8_t *memory, int64_t rows) {
    float *p = (float *)memory;
    return (partial){p, p + TILE_ROWS_MAX, p + TILE_ROWS_MAX + rows * 16};
}

static size_t partial_bytes(int64_t rows, int64_t dim) {
    return (size_t)(TILE_ROWS_MAX + rows * (16 + dim)) * 4 + 64;
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
        hs_block_load(t, first, skip, count);
        hs_block_scores(t, count);
        for (int64_t r = 0; r < t->rows; r++) {
            int64_t position = t->position + r / t->group;
            int64_t low = t->window ? max64(0, position - t->window + 1 - first) : 0;
            hs_block_soften(t, r, low, min64(count, position + 1 - first), p);
        }
        hs_block_values(t, p);
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
            _mm512_storeu_ps(out + d,
                             _mm512_div_ps(_mm512_loadu_ps(p->values + r * t->dim + d), sum));
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
    return (size_t)((TILE_ROWS_MAX + GROUP + 2 * KEYS) * dim + TILE_ROWS_MAX * (KEYS + 1)) * 4;
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
