/* This file runs a whole decoder (Llama and its kin) in one call: embedded tokens in, logits out.
 *
 * It computes exactly what the single operators compute, in the same order, so the two agree bit
 * for bit; what it saves is the way through Python between operators (at batch 1 as long as the
 * arithmetic), and the float32 form of what is only read as packed rows.
 *
 * The feed-forward goes over at most FEED_ROWS rows at a time, so that its wide rows stay in cache.
 */
#include "cpu.h"

#define FEED_ROWS 256

typedef struct {
    hs_linear qkv, out, gate_up, down;
    const float *input_norm, *ffn_norm;   /* [hidden] */
    const float *q_norm, *k_norm;         /* [head_dim] or NULL */
    int64_t window;
} hs_layer;

typedef struct {
    int64_t layer_count, hidden, ffn;
    const hs_layer *layers;
    const float *norm;        /* [hidden] */
    const float *cos_sin;     /* [positions][head_dim] */
    hs_linear head;
    hs_heads heads;
    float eps;
    int32_t reserved;
} hs_model;

typedef struct {
    const hs_model *model;
    const hs_layer *layer;
    const hs_linear *linear;
    void *packed;
    const float *x, *weight;   /* weight: of the norm before the product, or NULL */
    float *rows_of_workers;    /* one row for each thread */
    int64_t row_width, rows, rows_each;
    float *qkv, *q;
    const int32_t *positions;
    const int64_t *write_index;
    void *k_pool, *v_pool;
} stack_job;

/* Rows go through norm (or nothing) into the packed form that `linear` wants. */
static void norm_piece(void *argument, int64_t index, int worker) {
    const stack_job *job = argument;
    int64_t k = job->linear->k, last = min64((index + 1) * job->rows_each, job->rows);
    float *row_space = job->rows_of_workers + worker * job->row_width;
    for (int64_t row = index * job->rows_each; row < last; row++) {
        const float *x = job->x + row * k;
        if (job->weight) {
            hs_norm_row(x, job->weight, job->model->eps, k, row_space);
            x = row_space;
        }
        hs_pack_row(job->linear, job->packed, job->rows, row, x);
    }
}

static void silu_piece(void *argument, int64_t index, int worker) {
    const stack_job *job = argument;
    int64_t k = job->linear->k, last = min64((index + 1) * job->rows_each, job->rows);
    float *row_space = job->rows_of_workers + worker * job->row_width;
    for (int64_t row = index * job->rows_each; row < last; row++) {
        hs_silu_row(job->x + row * 2 * k, k, row_space);
        hs_pack_row(job->linear, job->packed, job->rows, row, row_space);
    }
}

static void rope_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const stack_job *job = argument;
    const hs_heads *heads = &job->model->heads;
    int64_t d = heads->head_dim, last = min64((index + 1) * job->rows_each, job->rows);
    for (int64_t row = index * job->rows_each; row < last; row++)
        hs_rope_row(heads, job->qkv + row * job->layer->qkv.n,
                    job->model->cos_sin + job->positions[row] * d, job->k_pool, job->v_pool,
                    job->write_index[row], job->layer->q_norm, job->layer->k_norm,
                    job->q + row * heads->query_heads * d);
}

/* `elements`: how many of a row make about a microsecond of work. */
static void share_rows(hs_task task, stack_job *job, int64_t rows, int64_t width,
                       int64_t elements) {
    job->rows = rows;
    job->rows_each = max64(1, elements / width);
    hs_parallel(task, job, ceil_div(rows, job->rows_each));
}

static void norm_multiply(stack_job *job, const hs_linear *linear, const float *weight,
                          const float *x, int64_t rows, float *out, int accumulate) {
    job->linear = linear;
    job->weight = weight;
    job->x = x;
    share_rows(norm_piece, job, rows, linear->k, 4096);
    hs_multiply(linear, job->packed, rows, out, accumulate);
}

static void feed_forward(stack_job *job, float *residual, int64_t rows, float *feed) {
    const hs_layer *layer = job->layer;
    int64_t hidden = job->model->hidden;
    for (int64_t first = 0; first < rows; first += FEED_ROWS) {
        int64_t count = min64(FEED_ROWS, rows - first);
        float *x = residual + first * hidden;
        norm_multiply(job, &layer->gate_up, layer->ffn_norm, x, count, feed, 0);
        job->linear = &layer->down;
        job->x = feed;
        share_rows(silu_piece, job, count, layer->down.k, 2048);
        hs_multiply(&layer->down, job->packed, count, x, 1);
    }
}

static size_t packed_bytes_max(const hs_model *model, int64_t rows) {
    size_t most = hs_packed_bytes(&model->head, rows);
    for (int64_t i = 0; i < model->layer_count; i++) {
        const hs_layer *layer = &model->layers[i];
        const hs_linear *each[4] = {&layer->qkv, &layer->out, &layer->gate_up, &layer->down};
        for (int j = 0; j < 4; j++) {
            size_t bytes = hs_packed_bytes(each[j], j < 2 ? rows : min64(rows, FEED_ROWS));
            if (bytes > most) most = bytes;
        }
    }
    return most;
}

static void keep_rows(float *x, int64_t width, const int64_t *sampled, int64_t count) {
    for (int64_t i = 0; i < count; i++) /* sampled rises, so no row is lost */
        if (sampled[i] != i) memmove(x + i * width, x + sampled[i] * width, (size_t)width * 4);
}

/* residual: [rows][hidden] embedded tokens, overwritten. k_pools, v_pools: one of each layer.
 * sampled: rows whose logits are wanted, ascending. logits: [sampled_count][vocab].
 * hidden: [sampled_count][hidden], what the head is given; or NULL. */
EXPORT int hs_forward(const hs_model *model, const hs_batch *batch, float *residual, int64_t rows,
                      const int32_t *positions, const int64_t *write_index, void *const *k_pools,
                      void *const *v_pools, const int64_t *sampled, int64_t sampled_count,
                      float *logits, float *hidden) {
    const hs_heads *heads = &model->heads;
    int64_t q_width = heads->query_heads * heads->head_dim;
    int64_t qkv_width = q_width + 2 * heads->kv_heads * heads->head_dim;
    int64_t row_width = (max64(max64(model->hidden, model->ffn), q_width) + 15) & ~(int64_t)15;
    size_t packed = (packed_bytes_max(model, rows) + 127) & ~(size_t)63;
    stack_job job = {.model = model, .positions = positions, .write_index = write_index,
                     .row_width = row_width};
    job.packed = hs_workspace(SPACE_PACKED,
                              packed + (size_t)(hs_thread_count() * row_width) * 4);
    job.qkv = hs_workspace(SPACE_QKV, (size_t)(rows * qkv_width) * 4);
    job.q = hs_workspace(SPACE_Q, (size_t)(rows * q_width) * 4);
    float *mixed = hs_workspace(SPACE_HIDDEN, (size_t)(rows * q_width) * 4);
    float *feed = hs_workspace(SPACE_FEED, (size_t)(min64(rows, FEED_ROWS) * 2 * model->ffn) * 4);
    if (!job.packed || !job.qkv || !job.q || !mixed || !feed) return NO_MEMORY;
    job.rows_of_workers = (float *)((uint8_t *)job.packed + packed);
    for (int64_t i = 0; i < model->layer_count; i++) {
        const hs_layer *layer = job.layer = &model->layers[i];
        job.k_pool = k_pools[i];
        job.v_pool = v_pools[i];
        norm_multiply(&job, &layer->qkv, layer->input_norm, residual, rows, job.qkv, 0);
        share_rows(rope_piece, &job, rows, qkv_width, 4096);
        if (i == model->layer_count - 1 && sampled_count == 0) return OK;
        hs_heads windowed = *heads;
        windowed.window = layer->window;
        int status = hs_attend(&windowed, batch, job.q, job.k_pool, job.v_pool, mixed);
        if (status != OK) return status;
        if (i == model->layer_count - 1) {
            keep_rows(mixed, q_width, sampled, sampled_count);
            keep_rows(residual, model->hidden, sampled, sampled_count);
            rows = sampled_count;
        }
        norm_multiply(&job, &layer->out, NULL, mixed, rows, residual, 1);
        feed_forward(&job, residual, rows, feed);
    }
    for (int64_t row = 0; hidden && row < rows; row++)
        hs_norm_row(residual + row * model->hidden, model->norm, model->eps, model->hidden,
                    hidden + row * model->hidden);
    norm_multiply(&job, &model->head, model->norm, residual, rows, logits, 0);
    return OK;
}
