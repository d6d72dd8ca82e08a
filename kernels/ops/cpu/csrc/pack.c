/* This file reads GGUF blocks: it brings rows of weights into panels for the products, and looks up
 * rows of an embedding. Each format is one small decoder from 32 elements to (u, d, m) with
 * w = d * u + m or w = d * (u - zero): the exact values of the file, requantized nowhere.
 */
#include "cpu.h"

/* The names are those of the GGUF formats; Python passes these numbers (native.py). */
enum { Q4_0 = 0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FORMAT_COUNT };

static const struct { int block_len, block_bytes, zero; } formats[FORMAT_COUNT] = {
    {32, 18, 8}, {32, 20, 0}, {32, 22, 16}, {32, 24, 0},
    {32, 34, 128}, {256, 144, 0}, {256, 176, 0}, {256, 210, 32},
};

static float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

/* 6-bit scale and min number j (of 8) of a K-quant superblock. */
static void k_scale(int j, const uint8_t *s, int *scale, int *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
        *min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
    }
}

/* 32 elements, number `b` of a row; d and m as the format means them (m is 0 where it has none). */
static void decode(int format, const uint8_t *row, int64_t b, uint8_t *u, float *d, float *m) {
    const uint8_t *p = row + (formats[format].block_len == 32 ? b : b / 8)
                                 * formats[format].block_bytes;
    int j = (int)(b % 8);
    uint32_t high = 0;
    *d = half_at(p);
    *m = 0;
    switch (format) {
    case Q4_0: case Q4_1: case Q5_0: case Q5_1:
        p += 2;
        if (format == Q4_1 || format == Q5_1) { *m = half_at(p); p += 2; }
        if (format == Q5_0 || format == Q5_1) { memcpy(&high, p, 4); p += 4; }
        for (int i = 0; i < 16; i++) {
            u[i] = (uint8_t)((p[i] & 15) | ((high >> i & 1) << 4));
            u[i + 16] = (uint8_t)((p[i] >> 4) | ((high >> (i + 16) & 1) << 4));
        }
        return;
    case Q8_0:
        for (int i = 0; i < 32; i++) u[i] = (uint8_t)(p[2 + i] ^ 0x80);
        return;
    case Q4_K: case Q5_K: {
        int scale, min;
        k_scale(j, p + 4, &scale, &min);
        *m = -(half_at(p + 2) * (float)min);
        *d *= (float)scale;
        const uint8_t *q = p + (format == Q4_K ? 16 : 48) + (j / 2) * 32;
        for (int i = 0; i < 32; i++) {
            u[i] = (uint8_t)(j % 2 ? q[i] >> 4 : q[i] & 15);
            if (format == Q5_K) u[i] |= (uint8_t)((p[16 + i] >> j & 1) << 4);
        }
        return;
    }
    default: return;
    }
}

/* 32 values of a row in float32; the only reader of Q6_K, whose scales cover 16 elements. */
static void decode_values(int format, const uint8_t *row, int64_t b, float *out) {
    if (format != Q6_K) {
        uint8_t u[BLOCK];
        float d, m;
        decode(format, row, b, u, &d, &m);
        for (int i = 0; i < BLOCK; i++)
            out[i] = d * (float)((int)u[i] - formats[format].zero) + m;
        return;
    }
    const uint8_t *p = row + b / 8 * 210;
    int j = (int)(b % 8), half = j / 4, quarter = j % 4;
    const uint8_t *low = p + half * 64 + (quarter & 1) * 32, *top = p + 128 + half * 32;
    const int8_t *scale = (const int8_t *)p + 192 + half * 8 + quarter * 2;
    float d = half_at(p + 208);
    for (int i = 0; i < BLOCK; i++) {
        int q = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        q |= (top[i] >> (quarter * 2) & 3) << 4;
        out[i] = d * (float)scale[i / 16] * (float)(q - 32);
    }
}

typedef struct {
    const hs_linear *linear;
    int format;
    const uint8_t *rows;
    uint8_t *data;
    void *scales;
} pack_job;

static void pack_panel(void *argument, int64_t panel, int worker) {
    (void)worker;
    const pack_job *job = argument;
    const hs_linear *lin = job->linear;
    int64_t blocks = lin->k / BLOCK, per_scale = lin->has_min ? 32 : 16;
    int64_t row_bytes = lin->k / formats[job->format].block_len * formats[job->format].block_bytes;
    int64_t block_bytes = PANEL * BLOCK * lin->bits / 8;
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *out = job->data + (panel * blocks + b) * block_bytes;
        int64_t at = (panel * blocks + b) * per_scale;
        memset(out, 0, (size_t)block_bytes);
        for (int n = 0; n < PANEL; n++) {
            uint8_t u[BLOCK] = {0};
            float d = 0, m = 0;
            int64_t row = panel * PANEL + n;
            if (row < lin->n) decode(job->format, job->rows + row * row_bytes, b, u, &d, &m);
            for (int i = 0; i < BLOCK; i++) {
                int group = i / 4;
                if (lin->bits == 8) out[group * 64 + n * 4 + i % 4] = u[i];
                else out[group / 2 * 64 + n * 4 + i % 4] |= (uint8_t)(u[i] << (group % 2 * 4));
            }
            if (lin->wide_scales) {
                ((float *)job->scales)[at + n] = d;
                if (lin->has_min) ((float *)job->scales)[at + 16 + n] = m;
            } else {
                ((uint16_t *)job->scales)[at + n] = (uint16_t)_cvtss_sh(d, 0);
                if (lin->has_min)
                    ((uint16_t *)job->scales)[at + 16 + n] = (uint16_t)_cvtss_sh(m, 0);
            }
        }
    }
}

/* Fills bits, has_min, wide_scales and zero for a format; BAD_ARGUMENT if it has no block path. */
EXPORT int hs_describe_format(int format, hs_linear *linear) {
    if (format < 0 || format >= Q6_K) return BAD_ARGUMENT;
    linear->kind = KIND_BLOCK;
    linear->bits = format == Q4_0 || format == Q4_1 || format == Q4_K ? 4 : 8;
    linear->has_min = format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K;
    linear->wide_scales = format == Q4_K || format == Q5_K;
    linear->zero = formats[format].zero;
    return OK;
}

/* rows: the bytes of [n] rows in `format`; data, scales: memory of the sizes in cpu.h. */
EXPORT int hs_pack_blocks(const hs_linear *linear, int format, const uint8_t *rows, uint8_t *data,
                          void *scales) {
    if (format < 0 || format >= Q6_K || linear->k % formats[format].block_len)
        return BAD_ARGUMENT;
    pack_job job = {linear, format, rows, data, scales};
    hs_parallel(pack_panel, &job, ceil_div(linear->n, PANEL));
    return OK;
}

typedef struct {
    const hs_linear *linear;
    const float *rows;
    void *data;
} dense_job;

static void pack_dense_panel(void *argument, int64_t panel, int worker) {
    (void)worker;
    const dense_job *job = argument;
    int64_t k = job->linear->k, n = job->linear->n, k_even = (k + 1) & ~(int64_t)1;
    for (int64_t i = 0; i < k_even; i++) {
        float values[PANEL];
        for (int c = 0; c < PANEL; c++) {
            int64_t row = panel * PANEL + c;
            values[c] = row < n && i < k ? job->rows[row * k + i] : 0.f;
        }
        if (job->linear->kind == KIND_FLOAT32) {
            if (i < k) memcpy((float *)job->data + (panel * k + i) * PANEL, values, sizeof values);
        } else {
            uint16_t *out = (uint16_t *)job->data + (panel * k_even + (i & ~(int64_t)1)) * PANEL;
            uint16_t bits[PANEL];
            _mm256_storeu_si256((__m256i *)bits, f32_to_bf16(_mm512_loadu_ps(values)));
            for (int c = 0; c < PANEL; c++) out[c * 2 + (i & 1)] = bits[c];
        }
    }
}

/* rows: float32 [n][k]. */
EXPORT int hs_pack_dense(const hs_linear *linear, const float *rows, void *data) {
    dense_job job = {linear, rows, data};
    hs_parallel(pack_dense_panel, &job, ceil_div(linear->n, PANEL));
    return OK;
}

/* out[i] = row ids[i] of a table of `count` rows of k elements, in float32. `format` is a GGUF
 * format, or FORMAT_COUNT + 0 / 1 / 2 for float32, bfloat16, float16. */
EXPORT int hs_embed(int format, const uint8_t *table, int64_t count, int64_t k, const int64_t *ids,
                    int64_t rows, float *out) {
    for (int64_t i = 0; i < rows; i++)
        if (ids[i] < 0 || ids[i] >= count) return BAD_ARGUMENT;
    if (format < FORMAT_COUNT) {
        int64_t row_bytes = k / formats[format].block_len * formats[format].block_bytes;
        for (int64_t i = 0; i < rows; i++)
            for (int64_t b = 0; b < k / BLOCK; b++)
                decode_values(format, table + ids[i] * row_bytes, b, out + i * k + b * BLOCK);
        return OK;
    }
    for (int64_t i = 0; i < rows; i++) {
        const uint16_t *narrow = (const uint16_t *)table + ids[i] * k;
        float *to = out + i * k;
        if (format == FORMAT_COUNT) memcpy(to, (const float *)table + ids[i] * k, (size_t)k * 4);
        else for (int64_t j = 0; j < k; j++) {
            uint32_t bits = (uint32_t)narrow[j] << 16;
            if (format == FORMAT_COUNT + 1) memcpy(to + j, &bits, 4);
            else to[j] = _cvtsh_ss(narrow[j]);
        }
    }
    return OK;
}
