/* This file cuts attention into tiles of queries and pieces of work for the threads. It reads
 * lengths, never a key.
 *
 * Keys are loaded once for a tile, so tiles are as large as leaves every thread its share. A tile
 * that is more than a fraction of a thread's share (decode over a long context) is cut into segments
 * of keys, which are merged afterwards. The kv heads of a tile of few rows are one piece where that
 * leaves enough of them: what a processor fetches beside one head's keys are the next one's. No cut
 * changes a bit of the result, see attention.c.
 */
#include "attention.h"

#define PIECES_EACH 4                  /* that a thread should find, to even out what they take */
#define TILE_ROWS_FEW 48               /* smaller tiles would spend their time on loading keys */
#define SEGMENTS_COUNTED 8             /* of a tile, when its size is chosen */
#define RESULTS_MAX ((size_t)64 << 20) /* bytes of results that wait to be merged */
#define COST_LOAD 12                   /* loading a key costs as much as so many rows */

static int64_t first_segment(const attend_job *job, int64_t position) {
    int64_t window = job->heads->window;
    return window ? max64(0, position - window + 1) / SEGMENT : 0;
}

static tile_at tile_of(const attend_job *job, int64_t row, int64_t token) {
    const hs_batch *batch = job->batch;
    int64_t tokens = min64(job->tile_tokens, batch->query_len[row] - token);
    int64_t position = batch->kv_len[row] - batch->query_len[row] + token;
    int64_t first = first_segment(job, position), last = ceil_div(position + tokens, SEGMENT);
    int64_t keys = position + tokens - first * SEGMENT;
    return (tile_at){.row = (int32_t)row, .token = (int32_t)token, .tokens = (int32_t)tokens,
                     .segment_first = (int32_t)first, .segment_count = (int32_t)(last - first),
                     .cost = keys * (tokens * job->group + COST_LOAD), .results = -1};
}

/* Halves tiles until there is work for all threads. Returns how many pieces of a kv head there are
 * then, about. */
static int64_t choose_tile(attend_job *job, int64_t threads) {
    job->tile_tokens = TILE_ROWS_MAX / job->group;
    for (;; job->tile_tokens /= 2) {
        int64_t reach = 0;
        job->tile_count = 0;
        for (int64_t row = 0; row < job->batch->rows; row++) {
            int64_t tiles = ceil_div(job->batch->query_len[row], job->tile_tokens);
            int64_t segments = ceil_div(job->batch->kv_len[row], SEGMENT);
            job->tile_count += tiles;
            reach += tiles * min64(segments, SEGMENTS_COUNTED);
        }
        if (threads == 1 || reach * job->heads->kv_heads >= PIECES_EACH * threads) return reach;
        if (job->tile_tokens * job->group / 2 < TILE_ROWS_FEW || job->tile_tokens == 1)
            return reach;
    }
}

/* Places pieces by falling cost, in 32 classes. */
static void sort_pieces(const attend_job *job, piece_at *pieces, int64_t cost_max) {
    int64_t place[33] = {0}, kv_heads = job->heads->kv_heads;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < job->tile_count; i++) {
            const tile_at *tile = &job->tiles[i];
            int64_t count = tile->results < 0 ? 1 : tile->segment_count, each = tile->heads_each;
            int64_t class = 31 - tile->cost * each / count * 31 / (cost_max * kv_heads);
            if (pass == 0) place[class + 1] += count * kv_heads / each;
            else
                for (int64_t s = 0; s < count; s++)
                    for (int64_t head = 0; head < kv_heads; head += each)
                        pieces[place[class]++] = (piece_at){(int32_t)i, (int32_t)s, (int32_t)head};
        }
        for (int c = 0; pass == 0 && c < 32; c++) place[c + 1] += place[c];
    }
}

int hs_attend_plan(attend_job *job) {
    int64_t threads = hs_threads_wanted(), kv_heads = job->heads->kv_heads, segments = 0, total = 0;
    int together = choose_tile(job, threads) >= PIECES_EACH * threads || threads == 1;
    for (int64_t row = 0; row < job->batch->rows; row++)
        segments += ceil_div(job->batch->query_len[row], job->tile_tokens)
                    * ceil_div(job->batch->kv_len[row], SEGMENT);
    size_t tile_bytes = (size_t)job->tile_count * sizeof(tile_at);
    size_t piece_bytes = (size_t)(segments * kv_heads) * sizeof(piece_at);
    tile_at *tiles = hs_workspace(SPACE_PLAN, tile_bytes + piece_bytes);
    if (!tiles) return NO_MEMORY;
    piece_at *pieces = (piece_at *)((uint8_t *)tiles + tile_bytes);
    int64_t count = 0, cost_max = 1;
    for (int64_t row = 0; row < job->batch->rows; row++)
        for (int64_t token = 0; token < job->batch->query_len[row]; token += job->tile_tokens) {
            tiles[count] = tile_of(job, row, token);
            cost_max = max64(cost_max, tiles[count].cost);
            total += tiles[count++].cost;
        }
    int64_t share = total * kv_heads / (PIECES_EACH * threads);
    job->results_bytes = 0;
    job->piece_count = 0;
    for (int64_t i = 0; i < count; i++) {
        tile_at *tile = &tiles[i];
        int64_t rows = tile->tokens * job->group;
        size_t bytes = (size_t)(kv_heads * tile->segment_count)
                       * partial_bytes(rows, job->heads->head_dim);
        tile->heads_each = (int32_t)(together && rows <= SOFT ? kv_heads : 1);
        int split = threads > 1 && tile->segment_count > 1
                    && tile->cost * tile->heads_each > share
                    && job->results_bytes + bytes <= RESULTS_MAX;
        if (split) {
            tile->results = (int64_t)job->results_bytes;
            job->results_bytes += bytes;
        }
        job->piece_count += (split ? tile->segment_count : 1) * kv_heads / tile->heads_each;
    }
    job->tiles = tiles;
    job->pieces = pieces;
    sort_pieces(job, pieces, cost_max);
    return OK;
}
