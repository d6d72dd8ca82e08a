/* This file multiplies rows with weights kept in blocks of 4 or 8 bits, on VNNI.
 *
 * x is quantized to int8 for each row and block of 32; the sums of 32 products are exact in int32,
 * then scaled and added in float32, block after block. Packed x is cut into tiles of up to 8 rows:
 *
 *     tile t, block b:  [rows in t][32] int8 | [rows in t] d | [rows in t] start
 *
 * so that a tile reads one stream. `start` is what the zero point or the min of the weight needs of
 * x: int32 -zero * sum(q), where the integer sums begin, or float32 d * sum(q), times m.
 */
#include "cpu.h"

#define RECORD(rows) ((rows) * (BLOCK + 8))

static int64_t tile_rows(int64_t rows, int64_t tile) { return min64(TILE, rows - tile * TILE); }

void hs_quantize_row(const hs_linear *linear, uint8_t *packed, int64_t rows, int64_t row,
                     const float *x) {
    int64_t blocks = linear->k / BLOCK, tile = row / TILE, r = row % TILE;
    int64_t in_tile = tile_rows(rows, tile);
    uint8_t *record = packed + tile * RECORD(TILE) * blocks;
    for (int64_t b = 0; b < blocks; b++, record += RECORD(in_tile)) {
        __m512 low = _mm512_loadu_ps(x + b * BLOCK), high = _mm512_loadu_ps(x + b * BLOCK + 16);
        /* As integers |NaN| > |inf| > finite: a hostile value survives as a NaN or inf scale. */
        const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
        uint32_t bits = _mm512_reduce_max_epu32(
            _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                             _mm512_and_si512(_mm512_castps_si512(high), magnitude)));
        float largest;
        memcpy(&largest, &bits, 4);
        float inverse = largest > 1e-35f ? 127.f / largest : 0.f;
        float d = largest / 127.f;
        __m512i low_q = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse)));
        __m512i high_q = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)(record + r * BLOCK), _mm512_cvtsepi32_epi8(low_q));
        _mm_storeu_si128((__m128i *)(record + r * BLOCK + 16), _mm512_cvtsepi32_epi8(high_q));
        int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low_q, high_q));
        float *scales = (float *)(record + in_tile * BLOCK);
        scales[r] = d;
        if (linear->has_min) scales[in_tile + r] = d * (float)sum;
        else ((int32_t *)scales)[in_tile + r] = -linear->zero * sum;
    }
}

INLINE __m512 load_scale(const void *scales, int64_t at, const int wide) {
    if (wide) return _mm512_loadu_ps((const float *)scales + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)scales + at)));
}

INLINE __m512i four_of(const uint8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* One panel times one tile of `rows` rows. */
INLINE void tile_product(const int rows, const int bits, const int has_min, const int wide,
                         const uint8_t *x, const uint8_t *w, const void *scales, int64_t blocks,
                         __m512 *acc) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const int64_t next = blocks * (PANEL * BLOCK * bits / 8);   /* bytes to the next panel */
    for (int64_t b = 0; b < blocks; b++) {
        const float *dx = (const float *)(x + rows * BLOCK);
        __m512 d = load_scale(scales, b * (has_min ? 32 : 16), wide);
        _mm_prefetch((const char *)scales + (blocks + b) * (has_min ? 32 : 16) * (wide ? 4 : 2),
                     _MM_HINT_T0);
        __m512i sums[TILE];
        for (int r = 0; r < rows; r++)
            sums[r] = has_min ? _mm512_setzero_si512()
                              : _mm512_set1_epi32(((const int32_t *)dx)[rows + r]);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            __m512i even, odd;
            /* Weights come from memory, not from a cache: the next panel is fetched meanwhile. */
            _mm_prefetch((const char *)w + next + pair * 16 * bits, _MM_HINT_T0);
            if (bits == 8)
                _mm_prefetch((const char *)w + next + pair * 128 + 64, _MM_HINT_T0);
            if (bits == 4) {
                __m512i both = _mm512_loadu_si512(w + pair * 64);
                even = _mm512_and_si512(both, nibble);
                odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            } else {
                even = _mm512_loadu_si512(w + pair * 128);
                odd = _mm512_loadu_si512(w + pair * 128 + 64);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                sums[r] = _mm512_dpbusd_epi32(sums[r], even, four_of(x + r * BLOCK + pair * 8));
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                sums[r] = _mm512_dpbusd_epi32(sums[r], odd, four_of(x + r * BLOCK + pair * 8 + 4));
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r]),
                                     _mm512_mul_ps(d, _mm512_set1_ps(dx[r])), acc[r]);
        if (has_min) {
            __m512 m = load_scale(scales, b * 32 + 16, wide);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(dx[rows + r]), acc[r]);
        }
        w += PANEL * BLOCK * bits / 8;
        x += RECORD(rows);
    }
}

INLINE void panel_product(const int rows, const int bits, const int has_min, const int wide,
                          const hs_linear *lin, const uint8_t *x, int64_t panel, float *out,
                          int accumulate) {
    int64_t blocks = lin->k / BLOCK, at = panel * blocks;
    __mmask16 mask = tail_mask(lin->n - panel * PANEL);
    __m512 acc[TILE];
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    tile_product(rows, bits, has_min, wide, x,
                 (const uint8_t *)lin->data + at * (PANEL * BLOCK * bits / 8),
                 (const uint8_t *)lin->scales + at * (has_min ? 32 : 16) * (wide ? 4 : 2), blocks,
                 acc);
    out += panel * PANEL;
    __m512 bias = lin->bias ? _mm512_maskz_loadu_ps(mask, lin->bias + panel * PANEL)
                            : _mm512_setzero_ps();
    for (int r = 0; r < rows; r++) {
        __m512 value = lin->bias ? _mm512_add_ps(acc[r], bias) : acc[r];
        float *to = out + r * lin->n;
        if (accumulate) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, to));
        _mm512_mask_storeu_ps(to, mask, value);
    }
}

/* Panels [panel_first, panel_last) times rows [row_first, row_last); row_first begins a tile. */
INLINE void span(const int bits, const int has_min, const int wide, const hs_linear *lin,
                 const uint8_t *packed, int64_t rows, int64_t row_first, int64_t row_last,
                 int64_t panel_first, int64_t panel_last, float *out, int accumulate) {
    int64_t tile_bytes = RECORD(TILE) * (lin->k / BLOCK);
    for (int64_t panel = panel_first; panel < panel_last; panel++)
        for (int64_t row = row_first; row < row_last; row += TILE) {
            const uint8_t *x = packed + row / TILE * tile_bytes;
            float *to = out + row * lin->n;
#define ROWS(count) \
    case count: panel_product(count, bits, has_min, wide, lin, x, panel, to, accumulate); break
            switch (tile_rows(rows, row / TILE)) {
                ROWS(1); ROWS(2); ROWS(3); ROWS(4); ROWS(5); ROWS(6); ROWS(7); ROWS(8);
            }
#undef ROWS
        }
}

#define SPAN(name, bits, has_min, wide)                                                        \
    static __attribute__((noinline)) void name(                                                \
        const hs_linear *lin, const uint8_t *packed, int64_t rows, int64_t r0, int64_t r1,     \
        int64_t p0, int64_t p1, float *out, int accumulate) {                                  \
        span(bits, has_min, wide, lin, packed, rows, r0, r1, p0, p1, out, accumulate);         \
    }
SPAN(span_4, 4, 0, 0)
SPAN(span_4_min, 4, 1, 0)
SPAN(span_4_min_wide, 4, 1, 1)
SPAN(span_8, 8, 0, 0)
SPAN(span_8_min, 8, 1, 0)
SPAN(span_8_min_wide, 8, 1, 1)

void hs_block_span(const hs_linear *lin, const void *packed, int64_t rows, int64_t row_first,
                   int64_t row_last, int64_t panel_first, int64_t panel_last, float *out,
                   int accumulate) {
    (lin->bits == 4 ? (lin->has_min ? (lin->wide_scales ? span_4_min_wide : span_4_min) : span_4)
                    : (lin->has_min ? (lin->wide_scales ? span_8_min_wide : span_8_min) : span_8))(
        lin, packed, rows, row_first, row_last, panel_first, panel_last, out, accumulate);
}
