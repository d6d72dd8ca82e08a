/* This file is what the C sources of the fast CPU path share: structs that Python fills through
 * ctypes, the thread pool's door, and vector primitives. It does not know torch or the GGUF file.
 *
 * Laws: no function here aborts or prints; failure is a negative return value. Every element of a
 * result is reduced in an order that depends on K or on absolute positions alone: never on the
 * number of rows, on the place of a row, or on the number of threads.
 */
#ifndef HISTRIO_CPU_H
#define HISTRIO_CPU_H

#include <immintrin.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define PANEL 16    /* output columns in a panel: the float lanes of a vector */
#define BLOCK 32    /* elements of K under one scale */
#define TILE 8      /* rows multiplied together */

enum { OK = 0, NO_MEMORY = -1, BAD_ARGUMENT = -2 };

/* ---- threads.c ---- */
typedef void (*hs_task)(void *argument, int64_t index, int worker);
void hs_parallel(hs_task task, void *argument, int64_t count);
int hs_thread_count(void);    /* of places for what each thread has of its own */
int hs_threads_wanted(void);  /* that will share the next job */
/* Memory that belongs to the calling thread; the same place again at the next call with `slot`. */
void *hs_workspace(int slot, size_t bytes);
enum { SPACE_PACKED, SPACE_ATTENTION, SPACE_FEED, SPACE_QKV, SPACE_HIDDEN, SPACE_Q, SPACE_SAMPLE,
       SPACE_PLAN, SPACE_COUNT };

/* ---- linear: weights as panels of 16 output columns ---- */
enum { KIND_FLOAT32 = 0, KIND_BFLOAT16 = 1, KIND_BLOCK = 2 };

typedef struct {
    int32_t kind;
    int32_t bits;        /* 4 or 8 (blocks) */
    int32_t has_min;     /* blocks: w = d * u + m; otherwise w = d * (u - zero) */
    int32_t wide_scales; /* blocks: d and m are float32, otherwise float16 */
    int32_t zero;
    int32_t reserved;
    int64_t n, k;
    const void *data;    /* float32: [panel][k][16]; bfloat16: [panel][k/2][16][2];
                            blocks: [panel][block][16 * 32 * bits / 8 bytes] */
    const void *scales;  /* blocks: [panel][block][16 d, then 16 m if has_min] */
    const float *bias;   /* [n] or NULL */
} hs_linear;

size_t hs_packed_bytes(const hs_linear *linear, int64_t rows);
/* Brings one row of x (float32 [k]) into the form in which `linear` wants `rows` rows. */
void hs_pack_row(const hs_linear *linear, void *packed, int64_t rows, int64_t row, const float *x);
/* out[rows][n] (+)= packed x times the weight, plus bias. */
void hs_multiply(const hs_linear *linear, const void *packed, int64_t rows, float *out,
                 int accumulate);
void hs_block_span(const hs_linear *linear, const void *packed, int64_t rows, int64_t row_first,
                   int64_t row_last, int64_t panel_first, int64_t panel_last, float *out,
                   int accumulate);
void hs_dense_span(const hs_linear *linear, const void *packed, int64_t rows, int64_t row_first,
                   int64_t row_last, int64_t panel_first, int64_t panel_last, float *out,
                   int accumulate);
void hs_quantize_row(const hs_linear *linear, uint8_t *packed, int64_t rows, int64_t row,
                     const float *x);

/* ---- norm, rope, activation: one row each ---- */
typedef struct {
    int64_t query_heads, kv_heads, head_dim;
    int32_t pool_bf16;   /* the pools hold bfloat16, otherwise float32 */
    int32_t reserved;
    float scale;         /* of attention scores */
    float eps;           /* of q_norm and k_norm */
    int64_t window;      /* keys that a query sees, itself included; 0: all */
} hs_heads;

void hs_norm_row(const float *x, const float *weight, float eps, int64_t n, float *out);
void hs_silu_row(const float *gate_up, int64_t n, float *out);
void hs_rope_row(const hs_heads *heads, float *qkv, const float *cos_sin, void *k_pool,
                 void *v_pool, int64_t write_index, const float *q_norm, const float *k_norm,
                 float *q_out);

/* ---- attention.c, with attend_plan.c and attend_block.c ---- */
typedef struct {
    int64_t rows, page_size, pages_max;
    const int32_t *page_table;   /* [rows][pages_max] */
    const int32_t *query_start;  /* [rows + 1] */
    const int32_t *query_len;    /* [rows] */
    const int32_t *kv_len;       /* [rows] */
} hs_batch;

int hs_attend(const hs_heads *heads, const hs_batch *batch, const float *q, const void *k_pool,
              const void *v_pool, float *out);

/* ---- vector primitives ---- */
INLINE __mmask16 tail_mask(int64_t left) {
    return left >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << left) - 1u);
}

INLINE __m512 bf16_to_f32(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

#ifdef __AVX512BF16__
INLINE __m256i f32_to_bf16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

/* acc + the products of both halves of each pair */
INLINE __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#else /* the first CPUs with VNNI lack it: two multiplications for one */
INLINE __m256i f32_to_bf16(__m512 v) {
    __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
    const __m512i upper = _mm512_set1_epi32((int32_t)0xFFFF0000);
    acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, upper)), acc);
}
#endif

/* e^x with a relative error below 2e-7; 0 below -87.3, inf above 89. NaN stays NaN: where an operand
 * is NaN, min and max give the second one. Results that are no normal floats would cost a hundred
 * times as much, and there are many where most of a row is barred. */
INLINE __m512 exp_ps(__m512 x) {
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    x = _mm512_max_ps(_mm512_set1_ps(-104.f), _mm512_min_ps(_mm512_set1_ps(89.f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    /* Taylor up to r^7 / 7!: with |r| <= ln(2) / 2 the next term is below 6e-9. */
    __m512 p = _mm512_set1_ps(1.f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_maskz_scalef_ps(normal, p, n);
}

/* 2^x for x <= 0 with a relative error below 5e-6, and 2^-126 for all that is less. NaN stays NaN. */
INLINE __m512 exp2_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.f), x);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n);
    /* Of degree 4 with the least relative error for |r| <= 1/2, and exact where r = 0. */
    __m512 p = _mm512_set1_ps(9.582853236e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590642594e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402409862e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931241933e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
