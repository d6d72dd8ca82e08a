/* This file is the pool of threads that shares out the pieces of one operator at a time.
 *
 * A job is a function and a number of pieces. Its state is one 64-bit word, generation << 32 |
 * pieces not yet handed out, so that taking a piece is one compare-and-swap and a thread that
 * comes late, or never, holds nothing up: the job ends when every piece is done, not when every
 * thread has arrived. That matters where other processes use the same cores. Threads without work
 * spin for some tens of microseconds (the gap between two operators), then sleep on a futex: an
 * idle pool costs nothing.
 *
 * Laws: one job at a time; a caller that finds the pool taken computes its pieces itself. After
 * fork the child starts a pool of its own at its first job. Pool threads block all signals.
 */
#define _GNU_SOURCE
#include "cpu.h"
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define THREADS_MAX 256
#define SPIN_NS 60000   /* longer than Python needs between two operators */

static struct {
    _Alignas(64) _Atomic uint64_t word;
    _Alignas(64) _Atomic int64_t done;
    _Alignas(64) _Atomic int32_t asleep;
    _Atomic uint32_t alarm;
    _Alignas(64) hs_task task;
    void *argument;
    int64_t count;
    int wanted, started;
    pthread_mutex_t caller;
} pool = {.wanted = 1, .caller = PTHREAD_MUTEX_INITIALIZER};

/* Pieces done since the start, by anybody: whoever looks twice sees whether work goes on. */
static _Atomic uint32_t pieces_done;

static void count_piece(void) {
    atomic_fetch_add_explicit(&pieces_done, 1, memory_order_relaxed);
}

EXPORT int hs_progress(void) {
    return (int)(atomic_load_explicit(&pieces_done, memory_order_relaxed) & 0x7fffffff);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Does one piece of the current job; 0 when none is left. */
static int take_piece(int worker) {
    uint64_t word = atomic_load_explicit(&pool.word, memory_order_acquire);
    while ((uint32_t)word != 0) {
        if (atomic_compare_exchange_weak_explicit(&pool.word, &word, word - 1,
                                                  memory_order_acq_rel, memory_order_acquire)) {
            /* The job can't end before this piece does, so its fields stay as they are. */
            pool.task(pool.argument, pool.count - (int64_t)(uint32_t)word, worker);
            count_piece();
            atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
            return 1;
        }
    }
    return 0;
}

static void sleep_until_job(void) {
    uint32_t alarm = atomic_load(&pool.alarm);
    atomic_fetch_add(&pool.asleep, 1);
    if ((uint32_t)atomic_load(&pool.word) == 0)
        syscall(SYS_futex, &pool.alarm, FUTEX_WAIT_PRIVATE, alarm, NULL, NULL, 0);
    atomic_fetch_sub(&pool.asleep, 1);
}

static void *worker_main(void *argument) {
    int worker = (int)(intptr_t)argument;
    int64_t idle_since = now_ns();
    for (;;) {
        if (worker < pool.wanted && take_piece(worker)) {
            while (take_piece(worker)) {}
            idle_since = now_ns();
        }
        for (int i = 0; i < 32 && (uint32_t)atomic_load_explicit(
                            &pool.word, memory_order_relaxed) == 0; i++)
            _mm_pause();
        if ((uint32_t)atomic_load_explicit(&pool.word, memory_order_relaxed) == 0
            && now_ns() - idle_since > SPIN_NS) {
            sleep_until_job();
            idle_since = now_ns();
        }
    }
    return NULL;
}

static void forget_threads(void) {
    pool.started = 0;
    atomic_store(&pool.word, 0);
    atomic_store(&pool.asleep, 0);
    pthread_mutex_init(&pool.caller, NULL);
}

static void start_threads(void) {
    static int registered;
    if (!registered) {
        pthread_atfork(NULL, NULL, forget_threads);
        registered = 1;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.started < pool.wanted - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, worker_main,
                           (void *)(intptr_t)(pool.started + 1)) != 0)
            break;   /* fewer threads are no failure: the caller does what is left */
        pool.started++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

EXPORT int hs_set_threads(int count) {
    if (count < 1) return BAD_ARGUMENT;
    if (count > THREADS_MAX) count = THREADS_MAX;
    pthread_mutex_lock(&pool.caller);
    pool.wanted = count;   /* threads above the number take no pieces, see worker_main */
    pthread_mutex_unlock(&pool.caller);
    return OK;
}

int hs_threads_wanted(void) { return pool.wanted; }

/* One more than the highest index of a thread that may take pieces now. */
int hs_thread_count(void) {
    return pool.started + 1 > pool.wanted ? pool.started + 1 : pool.wanted;
}

/* Calls task(argument, i, worker) for each i in [0, count), in any order, on any thread. `worker`
 * is below THREADS_MAX and differs between pieces that run at one time. */
void hs_parallel(hs_task task, void *argument, int64_t count) {
    if (count <= 1 || pool.wanted == 1 || pthread_mutex_trylock(&pool.caller) != 0) {
        for (int64_t i = 0; i < count; i++) {
            task(argument, i, 0);
            count_piece();
        }
        return;
    }
    if (pool.started < pool.wanted - 1) start_threads();
    uint64_t generation = (atomic_load(&pool.word) >> 32) + 1;
    pool.task = task;
    pool.argument = argument;
    pool.count = count;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.word, generation << 32 | (uint64_t)(uint32_t)count);
    if (atomic_load(&pool.asleep) > 0) {
        atomic_fetch_add(&pool.alarm, 1);
        syscall(SYS_futex, &pool.alarm, FUTEX_WAKE_PRIVATE, pool.started, NULL, NULL, 0);
    }
    while (take_piece(0)) {}
    int64_t spins = 0;
    while (atomic_load_explicit(&pool.done, memory_order_acquire) != count) {
        if (++spins < 2000) _mm_pause();
        else sched_yield();   /* the thread with the last piece may want this very core */
    }
    pthread_mutex_unlock(&pool.caller);
}

typedef struct { void *memory; size_t bytes; } space;
static _Thread_local space spaces[SPACE_COUNT];

void *hs_workspace(int slot, size_t bytes) {
    space *s = &spaces[slot];
    if (s->bytes >= bytes) return s->memory;
    free(s->memory);
    size_t rounded = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
    if (rounded > ((size_t)4 << 20)) {
        rounded = (rounded + ((size_t)2 << 20) - 1) & ~(((size_t)2 << 20) - 1);
        s->memory = aligned_alloc((size_t)2 << 20, rounded);
        if (s->memory) madvise(s->memory, rounded, MADV_HUGEPAGE);
    } else {
        s->memory = aligned_alloc(4096, rounded);
    }
    s->bytes = s->memory ? rounded : 0;
    return s->memory;
}
