/* This file attends over paged keys and values: decode rows and prefill chunks by one routine.
 *
 * A tile is a few query tokens of one sequence times the query heads of one kv head. For each 64
 * keys (absolute positions [64 i, 64 i + 64)) the keys are transposed once, so that scores need no
 * sum across lanes, and the softmax is carried on online. Eight such blocks make a segment, whose
 * result (maximum, sum, weighted values) is merged into the tile's: where a tile is more than its
 * share of the work (decode over long contexts), its segments are shared out, see attend_plan.c.
 *
 * Laws: the order of reduction is fixed by absolute key positions, head_dim and nothing else, so a
 * result has the same bits in a prefill chunk, in decode, and with any page size. Over a float32
 * pool a key that a query may not see is neither multiplied nor added: it may be NaN. Over a
 * bfloat16 pool, where q and the softmax's weights are rounded to pairs of bfloat16 as well, that
 * holds for pages that aren't the sequence's.
 */
#include "attention.h"

static partial partial_at(uint8_t *memory, int64_t rows, int64_t dim) {
    float *p = (float *)memory;
    return (partial){p, p + rows * 16, p + rows * (16 + dim)};
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
        hs_block_attend(t, first, count, p);
    }
}

/* total = total merged with p, whose keys come after; the first one is taken as it is. */
static void merge(const tile_state *t, partial *total, const partial *p) {
    int64_t dim = t->dim;
    for (int64_t r = 0; r < t->rows; r++) {
        float a = total->maximum[r], b = p->maximum[r], top = a > b ? a : b;
        if (b == -INFINITY) continue;
        float scale_a = 0.f, scale_b = 1.f;
        if (a != -INFINITY) {
            scale_a = power(t->bf16, a - top);
            scale_b = power(t->bf16, b - top);
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

/* Places the arrays of tile `at` in the thread's scratch; returns where results may follow. */
static uint8_t *open_tile(tile_state *t, const attend_job *job, const tile_at *at, int64_t kv_head,
                          int worker) {
    const hs_heads *heads = job->heads;
    t->job = job;
    t->kv_head = kv_head;
    t->row = at->row;
    t->group = job->group;
    t->tokens = at->tokens;
    t->rows = t->tokens * t->group;
    t->position = job->batch->kv_len[at->row] - job->batch->query_len[at->row] + at->token;
    t->dim = heads->head_dim;
    t->window = heads->window;
    t->bf16 = heads->pool_bf16 != 0;
    t->steps = t->bf16 ? t->dim / 2 : t->dim;
    t->scores = (float *)(job->scratch + (size_t)worker * job->scratch_bytes);
    t->keys = t->scores + SOFT * KEYS;
    t->values = t->keys + t->dim * KEYS;
    t->q = t->values + t->dim * KEYS;
    return (uint8_t *)(t->q + ceil_div(t->rows, GROUP) * GROUP * t->dim);
}

/* Room for a tile and as many results. */
static size_t tile_bytes(int64_t rows, int64_t dim, int64_t results) {
    return (size_t)(SOFT * KEYS + (rows + GROUP + 2 * KEYS) * dim) * 4
           + (size_t)results * partial_bytes(rows, dim);
}

static void load_queries(tile_state *t) {
    const hs_heads *heads = t->job->heads;
    int64_t token = t->job->batch->query_start[t->row] + t->position
                    - (t->job->batch->kv_len[t->row] - t->job->batch->query_len[t->row]);
    __m512 scale = _mm512_set1_ps(t->bf16 ? heads->scale * 1.44269504088896341f : heads->scale);
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t head = t->kv_head * t->group + r % t->group;
        const float *q = t->job->q + ((token + r / t->group) * heads->query_heads + head) * t->dim;
        float *to = t->q + r / GROUP * GROUP * t->steps + r % GROUP;
        for (int64_t d = 0; d < t->dim; d += 16) {
            float part[16];
            __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(q + d), scale);
            if (t->bf16) _mm256_storeu_si256((__m256i *)part, f32_to_bf16(scaled));
            else _mm512_storeu_ps(part, scaled);
            int64_t first = t->bf16 ? d / 2 : d, count = t->bf16 ? 8 : 16;
            for (int64_t i = 0; i < count; i++) to[(first + i) * GROUP] = part[i];
        }
    }
}

/* One segment for some kv heads; the results wait in job->results. */
static void segment_piece(const attend_job *job, piece_at piece, int worker) {
    const tile_at *at = &job->tiles[piece.tile];
    tile_state t;
    for (int64_t head = piece.head; head < piece.head + at->heads_each; head++) {
        open_tile(&t, job, at, head, worker);
        load_queries(&t);
        size_t nth = (size_t)(head * at->segment_count + piece.segment);
        partial part = partial_at(job->results + at->results + nth * partial_bytes(t.rows, t.dim),
                                  t.rows, t.dim);
        segment(&t, at->segment_first + piece.segment, &part);
    }
}

/* All segments; the kv heads in turn, while what one of them fetched for the next is in cache. */
static void whole_piece(const attend_job *job, piece_at piece, int worker) {
    const tile_at *at = &job->tiles[piece.tile];
    tile_state t;
    for (int64_t i = 0; i < at->segment_count; i++)
        for (int64_t nth = 0; nth < at->heads_each; nth++) {
            uint8_t *results = open_tile(&t, job, at, piece.head + nth, worker);
            size_t bytes = partial_bytes(t.rows, t.dim);
            partial total = partial_at(results + (size_t)(nth + 1) * bytes, t.rows, t.dim);
            partial part = partial_at(results, t.rows, t.dim);
            if (i == 0 || at->heads_each > 1) load_queries(&t);
            segment(&t, at->segment_first + i, i == 0 ? &total : &part);
            if (i > 0) merge(&t, &total, &part);
            if (i == at->segment_count - 1) write_tile(&t, &total);
        }
}

static void attend_piece(void *argument, int64_t index, int worker) {
    const attend_job *job = argument;
    piece_at piece = job->pieces[index];
    (job->tiles[piece.tile].results < 0 ? whole_piece : segment_piece)(job, piece, worker);
}

/* The results of a tile's segments together, in their order. */
static void merge_piece(void *argument, int64_t index, int worker) {
    const attend_job *job = argument;
    const tile_at *at = &job->tiles[index / job->heads->kv_heads];
    if (at->results < 0) return;
    tile_state t;
    open_tile(&t, job, at, index % job->heads->kv_heads, worker);
    size_t bytes = partial_bytes(t.rows, t.dim);
    uint8_t *results = job->results + at->results + (size_t)(t.kv_head * at->segment_count) * bytes;
    partial total = partial_at(results, t.rows, t.dim);
    for (int64_t i = 1; i < at->segment_count; i++) {
        partial part = partial_at(results + (size_t)i * bytes, t.rows, t.dim);
        merge(&t, &total, &part);
    }
    write_tile(&t, &total);
}

EXPORT int hs_attend(const hs_heads *heads, const hs_batch *batch, const float *q,
                     const void *k_pool, const void *v_pool, float *out) {
    int64_t group = heads->query_heads / heads->kv_heads, dim = heads->head_dim;
    if (group > TILE_ROWS_MAX || dim % 16 || group * heads->kv_heads != heads->query_heads)
        return BAD_ARGUMENT;
    attend_job job = {.heads = heads, .batch = batch, .q = q, .k_pool = k_pool, .v_pool = v_pool,
                      .out = out, .group = group};
    if (hs_attend_plan(&job) != OK) return NO_MEMORY;
    size_t bytes = tile_bytes(job.tile_tokens * group, dim, 2);
    size_t bytes_few = tile_bytes(SOFT, dim, heads->kv_heads + 1);
    job.scratch_bytes = ((bytes > bytes_few ? bytes : bytes_few) + 4095) & ~(size_t)4095;
    size_t scratch = (size_t)hs_thread_count() * job.scratch_bytes;
    job.scratch = hs_workspace(SPACE_ATTENTION, scratch + job.results_bytes);
    if (!job.scratch) return NO_MEMORY;
    job.results = job.scratch + scratch;
    hs_parallel(attend_piece, &job, job.piece_count);
    if (job.results_bytes) hs_parallel(merge_piece, &job, job.tile_count * heads->kv_heads);
    return OK;
}
