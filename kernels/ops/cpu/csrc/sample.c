/* This file draws the next token of each row from its logits: temperature, top-k, top-p, min-p.
 *
 * Nothing is sorted. Weights are positive floats, whose bits are ordered as they are; the value at
 * which a filter cuts is found digit by digit (11, 10 and 9 bits) from the count and the mass under
 * each digit. Sums are in float64, in an order that the vocabulary alone decides. The draw inverts
 * the cumulative distribution in order of ids.
 */
#include "cpu.h"
#include <math.h>

#define DIGITS 2048
#define CHUNK 64     /* weights whose sum is kept while the cumulative sum is formed */

typedef struct {
    const float *logits;
    const int64_t *row_index;
    int64_t n;
    const float *temperature;
    const int64_t *top_k;
    const double *top_p, *min_p, *noise;
    int64_t *token;
    uint8_t *scratch;
    size_t scratch_bytes;
} draw_job;

typedef struct {
    float *logits;
    int64_t n;
    const int64_t *row_index;
    const uint32_t *words;
    int64_t width;
} bar_job;

static void bar_piece(void *argument, int64_t index, int worker) {
    (void)worker;
    const bar_job *job = argument;
    float *x = job->logits + job->row_index[index] * job->n;
    const uint32_t *words = job->words + index * job->width;
    __m512 nothing = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < job->n; i += 16) {
        __mmask16 open = (__mmask16)(words[i >> 5] >> (i & 16));
        __mmask16 barred = (__mmask16)~open & tail_mask(job->n - i);
        if (!barred) continue;
        __m512 v = _mm512_maskz_loadu_ps(barred, x + i);
        _mm512_mask_storeu_ps(x + i, barred, _mm512_add_ps(v, nothing));
    }
}

/* Adds -inf to the tokens of rows row_index[i] of logits [..][n] whose bit is not set in words[i],
 * [rows][width] with a bit for each token. The rows are different ones. */
EXPORT int hs_bar(float *logits, int64_t n, const int64_t *row_index, int64_t rows,
                  const uint32_t *words, int64_t width) {
    if (width * 32 < n) return BAD_ARGUMENT;
    bar_job job = {logits, n, row_index, words, width};
    hs_parallel(bar_piece, &job, rows);
    return OK;
}

/* What passes: weights whose bits are above `edge`, and the first `room` of those equal to it. */
typedef struct { uint32_t edge; int64_t room; double mass; } cut;

static double min_double(double a, double b) { return a < b ? a : b; }

static uint32_t bits_of(float w) {
    uint32_t bits;
    memcpy(&bits, &w, 4);
    return bits;
}

/* The cut that keeps `count_max` weights, or fewer if the mass of those before one reaches
 * `mass_max`; at least one. */
static cut find_cut(const float *w, int64_t n, int64_t count_max, double mass_max) {
    static const int shifts[3] = {19, 9, 0}, widths[3] = {11, 10, 9};
    uint32_t counts[DIGITS];
    double masses[DIGITS], mass = 0;
    uint32_t prefix = 0;
    int64_t count = 0;
    for (int level = 0; level < 3; level++) {
        int shift = shifts[level], above = level ? shifts[level - 1] : 31;
        uint32_t last = (1u << widths[level]) - 1;
        memset(counts, 0, sizeof counts);
        memset(masses, 0, sizeof masses);
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = bits_of(w[i]);
            if (bits == 0 || (level && bits >> above != prefix)) continue;
            uint32_t digit = bits >> shift & last;
            counts[digit]++;
            masses[digit] += w[i];
        }
        uint32_t digit = last, lowest = 0;
        while (lowest <= last && counts[lowest] == 0) lowest++;
        if (lowest > last) break; /* weights of what was no number: all zero */
        while (digit > lowest && count + counts[digit] < count_max
               && mass + masses[digit] < mass_max) {
            count += counts[digit];
            mass += masses[digit--];
        }
        if (level == 0 && count + counts[digit] < count_max && mass + masses[digit] < mass_max)
            break; /* no limit lies within: all pass. (Further down one does, whatever rounding.) */
        prefix = prefix << widths[level] | digit;
        if (level < 2) continue;
        float value;
        memcpy(&value, &prefix, 4);
        int64_t equal = counts[digit], room = min64(equal, count_max - count);
        if (mass < mass_max) {
            double wanted = ceil((mass_max - mass) / value);
            if (wanted < (double)room) room = (int64_t)wanted;
        }
        room = max64(room, 1);
        return (cut){prefix, room, mass + (double)room * value};
    }
    return (cut){0, n, INFINITY};
}

static void apply_cut(float *w, int64_t n, cut c, double min_p) {
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 lanes = tail_mask(n - i);
        __m512 v = _mm512_maskz_loadu_ps(lanes, w + i);
        __m512i edge = _mm512_set1_epi32((int32_t)c.edge), bits = _mm512_castps_si512(v);
        __mmask16 equal = _mm512_mask_cmpeq_epi32_mask(lanes, bits, edge);
        __mmask16 kept = _mm512_cmpgt_epi32_mask(bits, edge);
        for (; equal && c.room > 0; c.room--) {
            kept |= equal & (__mmask16)-equal;
            equal &= (__mmask16)(equal - 1);
        }
        if (min_p > 0) {
            __m512d least = _mm512_set1_pd(min_p); /* the largest weight is 1 */
            __mmask8 low = _mm512_cmp_pd_mask(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), least,
                                              _CMP_GE_OQ);
            __mmask8 high = _mm512_cmp_pd_mask(_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)),
                                               least, _CMP_GE_OQ);
            kept &= (__mmask16)(low | high << 8);
        }
        _mm512_mask_storeu_ps(w + i, lanes, _mm512_maskz_mov_ps(kept, v));
    }
}

/* w = e^((x - peak) / temperature), in [0, 1] with the largest 1; what is no number becomes 0. */
static void to_weights(const float *x, int64_t n, float temperature, float *w) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < n; i += 16)
        top = _mm512_max_ps(top, _mm512_mask_loadu_ps(top, tail_mask(n - i), x + i));
    __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 inverse = _mm512_set1_ps(1.f / temperature), one = _mm512_set1_ps(1.f);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 lanes = tail_mask(n - i);
        __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, x + i), peak);
        __m512 e = _mm512_min_ps(exp_ps(_mm512_mul_ps(v, inverse)), one);
        __mmask16 number = _mm512_cmp_ps_mask(e, e, _CMP_ORD_Q);
        _mm512_mask_storeu_ps(w + i, lanes, _mm512_maskz_mov_ps(number, e));
    }
}

/* sums[c] of each chunk; returns the whole. w has zeros up to a multiple of CHUNK. */
static double sum_chunks(const float *w, int64_t chunks, double *sums) {
    double total = 0;
    for (int64_t c = 0; c < chunks; c++) {
        __m512d sum = _mm512_setzero_pd();
#pragma GCC unroll 8
        for (int j = 0; j < CHUNK / 8; j++)
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm256_loadu_ps(w + c * CHUNK + j * 8)));
        sums[c] = _mm512_reduce_add_pd(sum);
        total += sums[c];
    }
    return total;
}

static int64_t invert(const float *w, int64_t n, const double *sums, double total, double noise) {
    double target = noise * total, below = 0;
    int64_t chunk = 0, token = 0;
    if (target >= total) target = nextafter(total, 0); /* noise < 1, but the product may round up */
    while (chunk * CHUNK + CHUNK < n && below + sums[chunk] <= target) below += sums[chunk++];
    for (int64_t i = chunk * CHUNK; i < min64(n, (chunk + 1) * CHUNK); i++) {
        if (w[i] == 0) continue;
        token = i; /* the last one, should rounding carry the target past it */
        below += w[i];
        if (below > target) break;
    }
    return token;
}

static void draw_piece(void *argument, int64_t index, int worker) {
    const draw_job *job = argument;
    int64_t n = job->n, chunks = ceil_div(n, CHUNK), k = job->top_k[index];
    float *w = (float *)(job->scratch + (size_t)worker * job->scratch_bytes);
    double *sums = (double *)(w + chunks * CHUNK), p = job->top_p[index];
    to_weights(job->logits + job->row_index[index] * n, n, job->temperature[index], w);
    memset(w + n, 0, (size_t)(chunks * CHUNK - n) * 4);
    double total = sum_chunks(w, chunks, sums);
    int by_count = k > 0 && k < n;
    if (by_count || p < 1 || job->min_p[index] > 0) {
        cut c = {0, n, total};
        if (by_count) c = find_cut(w, n, k, INFINITY);
        c.mass = min_double(c.mass, total); /* infinite where nothing was cut */
        if (p < 1) c = find_cut(w, n, by_count ? k : n, p * c.mass);
        apply_cut(w, n, c, job->min_p[index]);
        total = sum_chunks(w, chunks, sums);
    }
    job->token[index] = invert(w, n, sums, total, job->noise[index]);
}

/* token[i] is drawn from row row_index[i] of logits [..][n], which stay; all limits are per draw.
 * top_k 0 or >= n, top_p >= 1 and min_p 0 filter nothing. noise in [0, 1). */
EXPORT int hs_draw(const float *logits, int64_t n, const int64_t *row_index, int64_t draws,
                   const float *temperature, const int64_t *top_k, const double *top_p,
                   const double *min_p, const double *noise, int64_t *token) {
    int64_t chunks = ceil_div(n, CHUNK);
    size_t bytes = (size_t)chunks * (CHUNK * 4 + 8);
    bytes = (bytes + 4095) & ~(size_t)4095;
    uint8_t *scratch = hs_workspace(SPACE_SAMPLE, bytes * (size_t)hs_thread_count());
    if (!scratch) return NO_MEMORY;
    draw_job job = {logits, row_index, n, temperature, top_k, top_p, min_p, noise, token,
                    scratch, bytes};
    hs_parallel(draw_piece, &job, draws);
    return OK;
}
