/* This file shares a product out to the threads: which rows and panels make one piece. */
#include "cpu.h"

#define ROW_GROUP 64   /* rows whose packed x stays in the level 2 cache beside a panel */

size_t hs_packed_bytes(const hs_linear *lin, int64_t rows) {
    if (lin->kind == KIND_FLOAT32) return (size_t)(rows * lin->k * 4);
    if (lin->kind == KIND_BFLOAT16) return (size_t)(rows * ((lin->k + 1) / 2) * 4);
    return (size_t)(rows * (lin->k / BLOCK) * (BLOCK + 8));
}

void hs_pack_row(const hs_linear *lin, void *packed, int64_t rows, int64_t row, const float *x) {
    if (lin->kind == KIND_BLOCK) {
        hs_quantize_row(lin, packed, rows, row, x);
        return;
    }
    if (lin->kind == KIND_FLOAT32) {
        float *out = (float *)packed + row * lin->k;
        if (out != x) memcpy(out, x, (size_t)lin->k * 4);
        return;
    }
    int64_t stride = (lin->k + 1) / 2 * 2;
    uint16_t *out = (uint16_t *)packed + row * stride;
    for (int64_t i = 0; i < stride; i += 16) {
        __mmask16 mask = tail_mask(lin->k - i), store = tail_mask(stride - i);
        _mm256_mask_storeu_epi16(out + i, store, f32_to_bf16(_mm512_maskz_loadu_ps(mask, x + i)));
    }
}

typedef struct {
    const hs_linear *linear;
    const void *packed;
    int64_t rows, panels, panels_each, pieces_across;
    float *out;
    int accumulate;
} multiply_job;

static void multiply_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const multiply_job *job = argument;
    int64_t row = index / job->pieces_across * ROW_GROUP;
    int64_t panel = index % job->pieces_across * job->panels_each;
    int64_t row_last = min64(row + ROW_GROUP, job->rows);
    int64_t panel_last = min64(panel + job->panels_each, job->panels);
    (job->linear->kind == KIND_BLOCK ? hs_block_span : hs_dense_span)(
        job->linear, job->packed, job->rows, row, row_last, panel, panel_last, job->out,
        job->accumulate);
}

void hs_multiply(const hs_linear *lin, const void *packed, int64_t rows, float *out,
                 int accumulate) {
    multiply_job job = {lin, packed, rows, ceil_div(lin->n, PANEL), 1, 1, out, accumulate};
    /* About 5 µs a piece and at least three pieces a thread: small enough that a core lost to
     * another process for a while costs little, large enough to hide the handing out. */
    int64_t cycles = min64(rows, ROW_GROUP) * lin->k / 6 + lin->k / 4 + 1;
    job.panels_each = max64(1, min64(20000 / cycles, job.panels / (3 * hs_thread_count())));
    if (rows <= 8) job.panels_each = max64(8, job.panels_each);
    job.pieces_across = ceil_div(job.panels, job.panels_each);
    hs_parallel(multiply_piece, &job, job.pieces_across * ceil_div(rows, ROW_GROUP));
}

typedef struct {
    const hs_linear *linear;
    const float *x;
    void *packed;
    int64_t rows, rows_each;
} pack_job;

static void pack_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const pack_job *job = argument;
    int64_t last = min64((index + 1) * job->rows_each, job->rows);
    for (int64_t row = index * job->rows_each; row < last; row++)
        hs_pack_row(job->linear, job->packed, job->rows, row, job->x + row * job->linear->k);
}

/* out[rows][n] (+)= x[rows][k] times the weight, plus bias. */
EXPORT int hs_linear_rows(const hs_linear *linear, const float *x, int64_t rows, float *out,
                          int accumulate) {
    if (rows <= 0) return OK;
    const void *packed = x;
    if (linear->kind != KIND_FLOAT32) {
        void *space = hs_workspace(SPACE_PACKED, hs_packed_bytes(linear, rows) + 64);
        if (!space) return NO_MEMORY;
        pack_job job = {linear, x, space, rows, max64(1, 16384 / linear->k)};
        hs_parallel(pack_piece, &job, ceil_div(rows, job.rows_each));
        packed = space;
    }
    hs_multiply(linear, packed, rows, out, accumulate);
    return OK;
}
