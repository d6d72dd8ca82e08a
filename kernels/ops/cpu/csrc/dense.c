/* This file multiplies rows with dense weights: float32, and pairs of bfloat16 (vdpbf16ps).
 *
 * Law: a result's element is one chain over K in ascending order whatever the number of rows, so
 * that float32 gives the same bits alone, in a batch and in a chunk. Several panels at once (few
 * rows) or several rows at once (many) only make enough independent chains to keep the units busy.
 */
#include "cpu.h"

INLINE __m512 step(const int bf16, __m512 acc, const void *w, const void *x) {
    if (bf16) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return dot_pairs(acc, _mm512_loadu_si512(w), _mm512_set1_epi32(pair));
    }
    return _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_set1_ps(*(const float *)x), acc);
}

/* `rows` rows times `panels` panels; both element kinds advance 4 bytes of x and 64 of w a step. */
INLINE void product(const int bf16, const int rows, const int panels, const hs_linear *lin,
                    const uint8_t *x, int64_t x_stride, int64_t panel, float *out,
                    int accumulate) {
    int64_t steps = bf16 ? (lin->k + 1) / 2 : lin->k;
    const uint8_t *w = (const uint8_t *)lin->data + panel * steps * 64;
    __m512 acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < rows * panels; i++) acc[i] = _mm512_setzero_ps();
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[p * rows + r] = step(bf16, acc[p * rows + r], w + p * steps * 64 + i * 64,
                                         x + r * x_stride + i * 4);
    }
    for (int p = 0; p < panels; p++) {
        int64_t n = (panel + p) * PANEL;
        __mmask16 mask = tail_mask(lin->n - n);
        for (int r = 0; r < rows; r++) {
            __m512 value = acc[p * rows + r];
            float *to = out + r * lin->n + n;
            if (lin->bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, lin->bias + n));
            if (accumulate) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to));
            _mm512_mask_storeu_ps(to, mask, value);
        }
    }
}

INLINE void few_rows(const int bf16, const int rows, const int panels, const hs_linear *lin,
                     const uint8_t *x, int64_t x_stride, int64_t panel_first, int64_t panel_last,
                     float *out, int accumulate) {
    int64_t panel = panel_first;
    for (; panel + panels <= panel_last; panel += panels)
        product(bf16, rows, panels, lin, x, x_stride, panel, out, accumulate);
    for (; panel < panel_last; panel++)
        product(bf16, rows, 1, lin, x, x_stride, panel, out, accumulate);
}

INLINE void span(const int bf16, const hs_linear *lin, const uint8_t *packed, int64_t row_first,
                 int64_t row_last, int64_t panel_first, int64_t panel_last, float *out,
                 int accumulate) {
    int64_t stride = bf16 ? (lin->k + 1) / 2 * 4 : lin->k * 4, row = row_first;
    if (row_last - row_first >= 8) {
        int64_t whole = (row_last - row_first) / 8 * 8;
        for (int64_t panel = panel_first; panel < panel_last; panel++)
            for (row = row_first; row < row_first + whole; row += 8)
                product(bf16, 8, 1, lin, packed + row * stride, stride, panel,
                        out + row * lin->n, accumulate);
        row = row_first + whole;
    }
    const uint8_t *x = packed + row * stride;
    out += row * lin->n;
#define ROWS(count, panels)                                                                \
    case count:                                                                            \
        few_rows(bf16, count, panels, lin, x, stride, panel_first, panel_last, out, accumulate); \
        break
    switch (row_last - row) {
        ROWS(1, 8); ROWS(2, 4); ROWS(3, 2); ROWS(4, 2); ROWS(5, 1); ROWS(6, 1); ROWS(7, 1);
    default: break;
    }
#undef ROWS
}

void hs_dense_span(const hs_linear *lin, const void *packed, int64_t rows, int64_t row_first,
                   int64_t row_last, int64_t panel_first, int64_t panel_last, float *out,
                   int accumulate) {
    (void)rows;
    if (lin->kind == KIND_BFLOAT16)
        span(1, lin, packed, row_first, row_last, panel_first, panel_last, out, accumulate);
    else span(0, lin, packed, row_first, row_last, panel_first, panel_last, out, accumulate);
}
