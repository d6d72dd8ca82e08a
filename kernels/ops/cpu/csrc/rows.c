/* This file is the small operators around the products: RMS norm, rotary embedding with the write
 * into the KV pools, SiLU, the most likely token. Each works on one row at a time, in float32, and
 * its exported twin shares the rows out to the threads.
 */
#include "cpu.h"
#include <math.h>

/* One order of reduction for each n: 64 lanes, then a fixed tree. */
INLINE float sum_of_squares(const float *x, int64_t n) {
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                      _mm512_setzero_ps()};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512 v = _mm512_loadu_ps(x + i + j * 16);
            sums[j] = _mm512_fmadd_ps(v, v, sums[j]);
        }
    for (; i < n; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(tail_mask(n - i), x + i);
        sums[0] = _mm512_fmadd_ps(v, v, sums[0]);
    }
    return _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

void hs_norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    __m512 scale = _mm512_set1_ps(1.f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = tail_mask(n - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
        _mm512_mask_storeu_ps(out + i, mask,
                              _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i)));
    }
}

void hs_silu_row(const float *gate_up, int64_t n, float *out) {
    const __m512 one = _mm512_set1_ps(1.f);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = tail_mask(n - i);
        __m512 gate = _mm512_maskz_loadu_ps(mask, gate_up + i);
        __m512 up = _mm512_maskz_loadu_ps(mask, gate_up + n + i);
        __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        __m512 value = _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, e)), up);
        _mm512_mask_storeu_ps(out + i, mask, value);
    }
}

/* Rotates pairs (i, i + d/2) of one head into `out`, which may be `x`. */
INLINE void rotate(const float *x, const float *cos_sin, int64_t d, float *out) {
    int64_t half = d / 2;
    for (int64_t i = 0; i < half; i += 16) {
        __mmask16 mask = tail_mask(half - i);
        __m512 c = _mm512_maskz_loadu_ps(mask, cos_sin + i);
        __m512 s = _mm512_maskz_loadu_ps(mask, cos_sin + half + i);
        __m512 a = _mm512_maskz_loadu_ps(mask, x + i);
        __m512 b = _mm512_maskz_loadu_ps(mask, x + half + i);
        _mm512_mask_storeu_ps(out + i, mask, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
        _mm512_mask_storeu_ps(out + half + i, mask, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}

INLINE void write_pool(const hs_heads *heads, void *pool, int64_t at, const float *values,
                       int64_t n) {
    if (!heads->pool_bf16) {
        memcpy((float *)pool + at, values, (size_t)n * 4);
        return;
    }
    uint16_t *out = (uint16_t *)pool + at;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 mask = tail_mask(n - i);
        __m256i narrow = f32_to_bf16(_mm512_maskz_loadu_ps(mask, values + i));
        _mm256_mask_storeu_epi16(out + i, mask, narrow);
    }
}

void hs_rope_row(const hs_heads *heads, float *qkv, const float *cos_sin, void *k_pool,
                 void *v_pool, int64_t write_index, const float *q_norm, const float *k_norm,
                 float *q_out) {
    int64_t d = heads->head_dim, hq = heads->query_heads, hkv = heads->kv_heads;
    for (int64_t h = 0; h < hq + hkv; h++) {
        float *x = qkv + h * d;
        const float *norm = h < hq ? q_norm : k_norm;
        if (norm) hs_norm_row(x, norm, heads->eps, d, x);
        rotate(x, cos_sin, d, h < hq ? q_out + h * d : x);
    }
    int64_t at = write_index * hkv * d;
    write_pool(heads, k_pool, at, qkv + hq * d, hkv * d);
    write_pool(heads, v_pool, at, qkv + (hq + hkv) * d, hkv * d);
}

typedef struct {
    const float *x, *weight;
    float *residual, *out;
    int64_t rows, n, rows_each;
    float eps;
} norm_job;

static void norm_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const norm_job *job = argument;
    int64_t n = job->n, last = min64((index + 1) * job->rows_each, job->rows);
    for (int64_t row = index * job->rows_each; row < last; row++) {
        const float *x = job->x + row * n;
        if (job->residual) {
            float *sum = job->residual + row * n;
            for (int64_t i = 0; i < n; i++) sum[i] += x[i];
            x = sum;
        }
        hs_norm_row(x, job->weight, job->eps, n, job->out + row * n);
    }
}

/* out = norm(x), or, with `residual`: residual += x, out = norm(residual). */
EXPORT int hs_rms_norm(const float *x, float *residual, const float *weight, float eps,
                       int64_t rows, int64_t n, float *out) {
    norm_job job = {x, weight, residual, out, rows, n, max64(1, 16384 / n), eps};
    hs_parallel(norm_piece, &job, ceil_div(rows, job.rows_each));
    return OK;
}

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, n, rows_each;
} silu_job;

static void silu_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const silu_job *job = argument;
    int64_t last = min64((index + 1) * job->rows_each, job->rows);
    for (int64_t row = index * job->rows_each; row < last; row++)
        hs_silu_row(job->gate_up + row * 2 * job->n, job->n, job->out + row * job->n);
}

EXPORT int hs_silu_mul(const float *gate_up, int64_t rows, int64_t n, float *out) {
    silu_job job = {gate_up, out, rows, n, max64(1, 6000 / n)};
    hs_parallel(silu_piece, &job, ceil_div(rows, job.rows_each));
    return OK;
}

typedef struct {
    const hs_heads *heads;
    float *qkv;
    const int32_t *positions;
    const float *cos_sin;
    void *k_pool, *v_pool;
    const int64_t *write_index;
    const float *q_norm, *k_norm;
    float *q_out;
    int64_t rows, rows_each;
} rope_job;

static void rope_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const rope_job *job = argument;
    const hs_heads *heads = job->heads;
    int64_t d = heads->head_dim, width = (heads->query_heads + 2 * heads->kv_heads) * d;
    int64_t last = min64((index + 1) * job->rows_each, job->rows);
    for (int64_t row = index * job->rows_each; row < last; row++)
        hs_rope_row(heads, job->qkv + row * width, job->cos_sin + job->positions[row] * d,
                    job->k_pool, job->v_pool, job->write_index[row], job->q_norm, job->k_norm,
                    job->q_out + row * heads->query_heads * d);
}

EXPORT int hs_rope_write(const hs_heads *heads, float *qkv, const int32_t *positions,
                         const float *cos_sin, void *k_pool, void *v_pool,
                         const int64_t *write_index, const float *q_norm, const float *k_norm,
                         int64_t rows, float *q_out) {
    int64_t width = (heads->query_heads + 2 * heads->kv_heads) * heads->head_dim;
    rope_job job = {heads, qkv, positions, cos_sin, k_pool, v_pool, write_index,
                    q_norm, k_norm, q_out, rows, max64(1, 12000 / width)};
    hs_parallel(rope_piece, &job, ceil_div(rows, job.rows_each));
    return OK;
}

typedef struct {
    const float *logits;
    float *peak;
    int64_t *token;
    int64_t n;
} best_job;

static void best_piece(void *argument, int64_t row, int worker) {
    (void)worker;
    const best_job *job = argument;
    const float *x = job->logits + row * job->n;
    __m512 top[4];
    for (int j = 0; j < 4; j++) top[j] = _mm512_set1_ps(-INFINITY);
    __mmask16 nan = 0;
    for (int64_t i = 0; i < job->n; i += 64)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __mmask16 mask = tail_mask(max64(0, job->n - i - j * 16));
            __m512 v = _mm512_mask_loadu_ps(top[j], mask, x + i + j * 16);
            nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            top[j] = _mm512_max_ps(top[j], v);
        }
    float peak = _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
    int64_t token = 0;
    while (token < job->n - 1 && x[token] != peak) {
        __m512 v = _mm512_maskz_loadu_ps(tail_mask(job->n - token), x + token);
        __mmask16 equal = _mm512_mask_cmp_ps_mask(tail_mask(job->n - token), v,
                                                  _mm512_set1_ps(peak), _CMP_EQ_OQ);
        if (equal) {
            token += __builtin_ctz(equal);
            break;
        }
        token = min64(token + 16, job->n - 1);
    }
    job->peak[row] = nan ? NAN : peak;
    job->token[row] = token;
}

/* The largest of each row of [rows][n] and the first place where it stands; NaN if there is one. */
EXPORT int hs_best(const float *logits, int64_t rows, int64_t n, float *peak, int64_t *token) {
    best_job job = {logits, peak, token, n};
    hs_parallel(best_piece, &job, rows);
    return OK;
}
