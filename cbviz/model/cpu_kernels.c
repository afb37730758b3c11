/* One pass of a Llama-family decoder on a CPU, in one call: norms, products, rotary embedding, KV write, attention over the block table.

   Plain C with GCC's vector extension; built on first use by `native.py`, called through ctypes by `cpu_pass.py`. `ops.py` is the specification.
   Weights are read where they lie in the mapped file, [out, in] row by row: float32, IEEE half, or 8 bits with a scale a row.

   No result depends on who shares the batch: each number is made by the same operations in the same order whatever the number of rows, the split of
   a prompt into chunks or the number of threads. A dot product has one vector accumulator along its length; attention goes through tiles of keys that
   begin at multiples of TILE; 8-bit products are sums of integers. (The idea of batch-invariant kernels: He et al., "Defeating Nondeterminism in LLM
   Inference", 2025.) */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define ROWS 8            /* rows of x held in registers at once, with NR rows of the weights: ROWS * NR accumulators */
#else
#define VL 8
#define ROWS 4
#endif
#define NR 3
#define NR1 8             /* rows of the weights at once where x has one row: hides the latency of the additions */
#define AHEAD 12          /* rows of the weights asked for before they are needed, into the second-level cache: into the first it was half as quick */
#define TILE 32           /* keys of one step of attention */
#define QROWS 32          /* query rows (queries times heads of a group) of one work item */
#define MAX_DIM 256
#define MAX_K 32768
#define PANEL 32          /* most weight rows of one work item */
#define SCRATCH ((size_t)(PANEL * 4096 > 4 * MAX_K ? PANEL * 4096 : 4 * MAX_K) * 4)
#define MAX_THREADS 64
#define INL static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));

enum { F32 = 0, F16 = 1, I8 = 2, I4 = 3 };   /* of weights: the first three; of keys and values: all, see kv_store.py for what a code means */
enum { STORE = 0, ADD = 1, SILU = 2 };

typedef struct {
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
    const void *qkv, *o, *gate_up, *down;
    const float *qkv_scale, *o_scale, *gate_up_scale, *down_scale;
    void *k_cache, *v_cache;
    uint16_t *k_scale, *v_scale, *k_zero, *v_zero;
    int64_t window;
} Layer;

typedef struct {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, inter, vocab, block_size, weights, kv, threads, sinks;
    double eps, scale;
    const float *freq, *norm, *embed_scale, *head_scale;
    const void *embed, *head;
    const Layer *layers;
} Model;

typedef struct {
    int64_t tokens, sequences, table_width, sampled;
    const int64_t *ids, *positions, *slots, *rows;
    const int32_t *table, *starts, *lens;
    float *logits;
    int64_t *marks;                    /* 0, or room for what `cbviz_marks` says: (part, nanoseconds at its end) pairs, the first is the beginning */
} Step;

enum { BEGIN, EMBED, QKV, ROPE_KV, ATTENTION, OUT, GATE_UP, DOWN, HEAD };   /* parts of a pass, as `cpu_pass.PARTS` names them */

/* ---- threads ----
   A job is a counter of items; (total, next) live in one word, so a claim that succeeds belongs to the job that is current. The caller works too. On a
   machine with other work a helper is often not let run just when it has begun an item: an item computes aside and asks `may_write` before it
   writes, and a caller that has nothing else left takes such an item over. The helper then finds that it may not write, and goes on. So nobody
   waits for the system's scheduler, but a late helper may still read (never write) what a job was given: the arguments are copied, and
   `cbviz_quiet` says when the memory behind them is no longer needed. */

enum { IDLE, CLAIMED, AT_WORK, TAKEN_OVER, WRITING };

typedef struct {
    char *scratch;
    _Atomic int state;
    long item;
    char args[256];
} Worker;

typedef void (*item_fn)(const void *, long, Worker *);

static struct {
    pthread_mutex_t run, sleep;
    pthread_cond_t wake;
    _Atomic uint64_t ticket;
    _Atomic int done, sleeping;
    int helpers;
    pid_t owner;
    item_fn fn;
    const void *args;
    size_t size;
    Worker workers[MAX_THREADS];       /* the first is the caller's */
} pool = {.run = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int limit = 1;     /* threads of this step, under pool.run */

INL void pause_cpu(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INL int claim(long *item) {
    uint64_t t = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while ((uint32_t)t < (uint32_t)(t >> 32))
        if (atomic_compare_exchange_weak_explicit(&pool.ticket, &t, t + 1, memory_order_acq_rel, memory_order_acquire)) {
            *item = (long)(uint32_t)t;
            return 1;
        }
    return 0;
}

/* Asked once by every item before its first write to memory that others see. 0: the item was taken over, leave. */
INL int may_write(Worker *me) {
    int at_work = AT_WORK;
    return me == &pool.workers[0] || atomic_compare_exchange_strong(&me->state, &at_work, WRITING);
}

static void *helper(void *arg) {
    Worker *me = arg;
    for (int idle = 0;;) {
        /* From here on the caller waits until the item is begun, and cannot end the job. */
        atomic_store(&me->state, CLAIMED);
        if (claim(&me->item)) {
            item_fn fn = pool.fn;
            memcpy(me->args, pool.args, pool.size);
            atomic_store(&me->state, AT_WORK);
            fn(me->args, me->item, me);
            if (atomic_load(&me->state) == WRITING) atomic_fetch_add_explicit(&pool.done, 1, memory_order_acq_rel);
            atomic_store(&me->state, IDLE);
            idle = 0;
        } else {
            atomic_store(&me->state, IDLE);
            if (++idle < 2000) {
                pause_cpu();
                continue;
            }
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleeping, 1);
            uint64_t t = atomic_load(&pool.ticket);
            if ((uint32_t)t >= (uint32_t)(t >> 32)) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.sleep);
            idle = 0;
        }
    }
    return 0;
}

/* Called with pool.run held. Returns 0 if there is no memory for the caller's own scratch. */
static int ready(int threads) {
    if (pool.owner != getpid()) {  /* after a fork the helpers are gone */
        pool.owner = getpid();
        pool.helpers = 0;
        atomic_store(&pool.sleeping, 0);
        for (int i = 0; i < MAX_THREADS; i++) atomic_store(&pool.workers[i].state, IDLE);
        pthread_mutex_init(&pool.sleep, 0);
        pthread_cond_init(&pool.wake, 0);
    }
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (!pool.workers[0].scratch && !(pool.workers[0].scratch = aligned_alloc(64, SCRATCH))) return 0;
    while (pool.helpers + 1 < threads) {
        Worker *w = &pool.workers[pool.helpers + 1];
        pthread_t id;
        if (!w->scratch && !(w->scratch = aligned_alloc(64, SCRATCH))) break;
        if (pthread_create(&id, 0, helper, w)) break;
        pthread_detach(id);
        pool.helpers++;
    }
    limit = threads;
    return 1;
}

static void run(item_fn fn, const void *args, size_t size, long items) {
    Worker *me = &pool.workers[0];
    if (limit < 2 || items < 2) {
        for (long i = 0; i < items; i++) fn(args, i, me);
        return;
    }
    long item;
    pool.fn = fn;
    pool.args = args;
    pool.size = size;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store(&pool.ticket, (uint64_t)items << 32);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    int mine = 0;
    for (; claim(&item); mine++) fn(args, item, me);
    for (int spins = 1; atomic_load_explicit(&pool.done, memory_order_acquire) + mine < items; spins++) {
        pause_cpu();
        if (spins % 256) continue;     /* some microseconds: longer than an item mostly takes */
        for (int i = 1; i <= pool.helpers; i++) {
            int at_work = AT_WORK;
            if (atomic_load(&pool.workers[i].state) != AT_WORK) continue;
            item = pool.workers[i].item;
            if (atomic_compare_exchange_strong(&pool.workers[i].state, &at_work, TAKEN_OVER)) fn(args, item, me), mine++;
        }
        sched_yield();                 /* a helper that writes, or has not begun, may be waiting for this very core */
    }
}

/* ---- numbers ---- */

INL vf splat(float x) { return x - (vf){0}; }
INL vf load(const float *p) { return *(const vfu *)p; }
INL void store(float *p, vf x) { *(vfu *)p = x; }

INL float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    union { uint32_t u; float f; } x = {(uint32_t)(h & 0x7fff) << 13}, magic = {(254u - 15) << 23};
    x.f *= magic.f;
    x.u |= (uint32_t)(h & 0x8000) << 16;
    return x.f;
#endif
}

INL uint16_t float_to_half(float f) {  /* nearest even; what is too large becomes the largest */
    f = f > 65504.f ? 65504.f : f < -65504.f ? -65504.f : f;
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#else
    union { float f; uint32_t u; } x = {f}, magic = {0};
    uint32_t sign = x.u & 0x80000000u;
    x.u ^= sign;
    if (x.u < (113u << 23)) {  /* a subnormal half */
        magic.u = 126u << 23;
        x.f += magic.f;
        x.u -= magic.u;
    } else {
        x.u += ((uint32_t)(15 - 127) << 23) + 0xfff + ((x.u >> 13) & 1);
        x.u >>= 13;
    }
    return (uint16_t)(x.u | sign >> 16);
#endif
}

INL vf load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf r;
    for (int i = 0; i < VL; i++) r[i] = half_to_float(p[i]);
    return r;
#endif
}

INL float sum(vf v) {
#if VL == 16
    vf a = v + __builtin_shuffle(v, (vi){8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15});
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
#else
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#endif
}

/* The sums of four vectors. */
INL void sum4(vf a, vf b, vf c, vf d, float *out) {
#if VL == 16
#define LO(x, y) (vf)_mm512_unpacklo_ps((__m512)(x), (__m512)(y))
#define HI(x, y) (vf)_mm512_unpackhi_ps((__m512)(x), (__m512)(y))
    vf p = LO(a, b) + HI(a, b), q = LO(c, d) + HI(c, d);
    __m512 s = (__m512)((vf)_mm512_shuffle_ps((__m512)p, (__m512)q, 0x44) + (vf)_mm512_shuffle_ps((__m512)p, (__m512)q, 0xee));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(s), 1)));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#elif defined(__AVX2__)
#define LO(x, y) (vf)_mm256_unpacklo_ps((__m256)(x), (__m256)(y))
#define HI(x, y) (vf)_mm256_unpackhi_ps((__m256)(x), (__m256)(y))
    vf p = LO(a, b) + HI(a, b), q = LO(c, d) + HI(c, d);
    __m256 h = (__m256)((vf)_mm256_shuffle_ps((__m256)p, (__m256)q, 0x44) + (vf)_mm256_shuffle_ps((__m256)p, (__m256)q, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
#else
    out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

/* exp: 2^n times a polynomial of degree 6 (relative error below 2e-7); exactly 0 below -87. */
INL vf vexp(vf x) {
    vf lo = splat(-87.f), hi = splat(88.f);
    vi keep = x > lo;
    x = (vf)(((vi)x & keep) | ((vi)lo & ~keep));
    vi small = x < hi;
    x = (vf)(((vi)x & small) | ((vi)hi & ~small));
    vf n = x * splat(1.44269504f) + splat(12582912.f);
    vi bits = (vi)n;
    n -= splat(12582912.f);
    vf r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.f);
    vi e = (bits - 0x4b400000 + 127) << 23;
    return (vf)((vi)(p * (vf)e) & keep);
}

INL vf silu(vf x) { return x / (splat(1.f) + vexp(-x)); }

/* ---- products ---- */

typedef struct {
    int type, how;                     /* of the weights; what becomes of the result */
    long rows, n, k, panel;            /* rows of x; results a row; length; results of one work item */
    const void *w;
    const float *scale, *bias, *x;
    long x_stride;                     /* in numbers of x, or of q */
    const int16_t *q;                  /* with 8-bit weights: x as integers, and a scale a row */
    const float *q_scale;
    float *y;
    long y_stride;
    long items;
    const char *then;                  /* what this thread will probably read after the panel it is at */
    const char *after;                 /* the weights of the pass' next product, how many items it has, and the bytes of one */
    long after_items, after_item;
} Product;

INL vf load_weight(int type, const void *w, long at) { return type == F16 ? load_half((const uint16_t *)w + at) : load((const float *)w + at); }

/* out[m][n] = x[m] . w[n0 + n] over whole vectors, m < mr, n < nr; up to three numbers behind a row are overwritten. `ahead`: nr rows of weights to ask for meanwhile. */
INL void tile(int mr, int nr, int type, const void *w, long n0, const char *ahead, const float *x, long xs, long k, float *out, long os) {
    vf acc[ROWS * NR1 > 24 ? 24 : ROWS * NR1];
    UNROLL for (int i = 0; i < mr * nr; i++) acc[i] = (vf){0};
    for (long at = 0; at + VL <= k; at += VL) {
        vf b[NR1];
        UNROLL for (int n = 0; n < nr; n++) b[n] = load_weight(type, w, (n0 + n) * k + at);
        UNROLL for (int n = 0; n < nr; n++) __builtin_prefetch(ahead + (n * k + at) * (type == F16 ? 2 : 4), 0, 2);
        UNROLL for (int m = 0; m < mr; m++) {
            vf a = load(x + m * xs + at);
            UNROLL for (int n = 0; n < nr; n++) acc[m * nr + n] += a * b[n];
        }
    }
    vf zero = {0};
    UNROLL for (int m = 0; m < mr; m++)
        UNROLL for (int n = 0; n < nr; n += 4) {
            vf *v = acc + m * nr + n;
            sum4(v[0], n + 1 < nr ? v[1] : zero, n + 2 < nr ? v[2] : zero, n + 3 < nr ? v[3] : zero, out + m * os + n);
        }
}

/* 8-bit weights: the row of x becomes integers too, as many levels as a sum of k products leaves room for in 32 bits (11,008 for 1,536, 14 bits). */
#if defined(__AVX512BW__)
#define QSTEP 32
typedef __m512i qacc;
#define QZERO _mm512_setzero_si512()
#define QLOADW(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define QLOADX(p) _mm512_loadu_si512(p)
#if defined(__AVX512VNNI__)
#define QDOT(acc, w, x) _mm512_dpwssd_epi32(acc, w, x)
#else
#define QDOT(acc, w, x) _mm512_add_epi32(acc, _mm512_madd_epi16(w, x))
#endif
#define QLOW(v) _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1))
#elif defined(__AVX2__)
#define QSTEP 16
typedef __m256i qacc;
#define QZERO _mm256_setzero_si256()
#define QLOADW(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p)))
#define QLOADX(p) _mm256_loadu_si256((const __m256i *)(p))
#define QDOT(acc, w, x) _mm256_add_epi32(acc, _mm256_madd_epi16(w, x))
#define QLOW(v) (v)
#else
#define QSTEP 16
typedef int32_t qacc __attribute__((vector_size(64)));
INL qacc wide_i8(const int8_t *p) { qacc r; for (int i = 0; i < 16; i++) r[i] = p[i]; return r; }
INL qacc wide_i16(const int16_t *p) { qacc r; for (int i = 0; i < 16; i++) r[i] = p[i]; return r; }
#define QZERO ((qacc){0})
#define QLOADW(p) wide_i8(p)
#define QLOADX(p) wide_i16(p)
#define QDOT(acc, w, x) ((acc) + (w) * (x))
#endif

INL void qsum4(qacc a, qacc b, qacc c, qacc d, int32_t *out) {
#if defined(__AVX2__)
    __m256i h = _mm256_hadd_epi32(_mm256_hadd_epi32(QLOW(a), QLOW(b)), _mm256_hadd_epi32(QLOW(c), QLOW(d)));
    _mm_storeu_si128((__m128i *)out, _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
#else
    qacc v[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        out[i] = 0;
        for (int j = 0; j < 16; j++) out[i] += v[i][j];
    }
#endif
}

/* As tile, over integers. */
INL void tile_i8(int mr, int nr, const int8_t *w, long n0, const char *ahead, const int16_t *x, long xs, long k, int32_t *out, long os) {
    qacc acc[ROWS * NR1 > 24 ? 24 : ROWS * NR1];
    UNROLL for (int i = 0; i < mr * nr; i++) acc[i] = QZERO;
    for (long at = 0; at + QSTEP <= k; at += QSTEP) {
        qacc b[NR1];
        UNROLL for (int n = 0; n < nr; n++) b[n] = QLOADW(w + (n0 + n) * k + at);
        UNROLL for (int n = 0; n < nr; n++) __builtin_prefetch(ahead + n * k + at, 0, 2);
        UNROLL for (int m = 0; m < mr; m++) {
            qacc a = QLOADX(x + m * xs + at);
            UNROLL for (int n = 0; n < nr; n++) acc[m * nr + n] = QDOT(acc[m * nr + n], b[n], a);
        }
    }
    qacc zero = QZERO;
    UNROLL for (int m = 0; m < mr; m++)
        UNROLL for (int n = 0; n < nr; n += 4) {
            qacc *v = acc + m * nr + n;
            qsum4(v[0], n + 1 < nr ? v[1] : zero, n + 2 < nr ? v[2] : zero, n + 3 < nr ? v[3] : zero, out + m * os + n);
        }
}

typedef union { float f; int32_t i; } Sum;
#define WIDEST 96                      /* most results of one work item */
#define SUM_STRIDE (WIDEST + 4)

/* What does not fill a vector at the end of each row. */
static __attribute__((noinline)) void add_last(const Product *p, int type, const void *w, long w0, int mr, int nr, long m0, Sum *to) {
    long k = p->k;
    for (int m = 0; m < mr; m++)
        for (int n = 0; n < nr; n++) {
            Sum *s = to + m * SUM_STRIDE + n;
            const float *x = p->x + (m0 + m) * p->x_stride;
            if (type == I8) for (long i = k - k % QSTEP; i < k; i++) s->i += ((const int8_t *)w)[(w0 + n) * k + i] * p->q[(m0 + m) * p->x_stride + i];
            else if (type == F16) for (long i = k - k % VL; i < k; i++) s->f = fmaf(half_to_float(((const uint16_t *)w)[(w0 + n) * k + i]), x[i], s->f);
            else for (long i = k - k % VL; i < k; i++) s->f = fmaf(((const float *)w)[(w0 + n) * k + i], x[i], s->f);
        }
}

/* Sums of rows m0.. with weight rows w0.. into `to`, before scale and bias. */
INL void block(const Product *p, int type, const void *w, long w0, const char *ahead, int mr, int nr, long m0, Sum *to) {
    if (type == I8) tile_i8(mr, nr, w, w0, ahead, p->q + m0 * p->x_stride, p->x_stride, p->k, &to->i, SUM_STRIDE);
    else tile(mr, nr, type, w, w0, ahead, p->x + m0 * p->x_stride, p->x_stride, p->k, &to->f, SUM_STRIDE);
    if (p->k % (type == I8 ? QSTEP : VL)) add_last(p, type, w, w0, mr, nr, m0, to);
}

/* Scale and bias, and into their place: `width` results of row m from n0 on. */
INL void finish(const Product *p, long m, long n0, long width, const Sum *from) {
    float *y = p->y + m * p->y_stride + n0, v[WIDEST];
    if (p->type == I8) for (long n = 0; n < width; n++) v[n] = (float)from[n].i * (p->q_scale[m] * p->scale[n0 + n]);
    else memcpy(v, from, width * 4);
    if (p->bias) for (long n = 0; n < width; n++) v[n] += p->bias[n0 + n];
    if (p->how == ADD) for (long n = 0; n < width; n++) y[n] += v[n];
    else memcpy(y, v, width * 4);
}

#if ROWS == 8
#define WITH_MORE_ROWS(type) WITH_ROWS(5, type) WITH_ROWS(6, type) WITH_ROWS(7, type) WITH_ROWS(8, type)
#else
#define WITH_MORE_ROWS(type)
#endif
#define WITH_ROWS(mr, type) case mr: block(p, type, w, w0, ahead, mr, NR, m0, to); break;
#define KERNELS(type) \
    static void rows_##type(const Product *p, const void *w, long w0, const char *ahead, int mr, long m0, Sum *to) { \
        switch (mr) { WITH_ROWS(1, type) WITH_ROWS(2, type) WITH_ROWS(3, type) WITH_ROWS(4, type) WITH_MORE_ROWS(type) } \
    } \
    static void one_##type(const Product *p, const void *w, long w0, const char *ahead, long m0, Sum *to) { block(p, type, w, w0, ahead, 1, 1, m0, to); } \
    static void eight_##type(const Product *p, const void *w, long w0, const char *ahead, Sum *to) { block(p, type, w, w0, ahead, 1, NR1, 0, to); }
KERNELS(F32)
KERNELS(F16)
KERNELS(I8)
#define CALL(type, name, ...) ((type) == F32 ? name##_F32(__VA_ARGS__) : (type) == F16 ? name##_F16(__VA_ARGS__) : name##_I8(__VA_ARGS__))

/* Where the rows lie that are needed AHEAD rows after row n of a panel of weights that ends at n1. Waiting for memory costs more than reading it: nobody begins
   a panel cold. */
INL const char *ahead_of(const Product *p, const void *w, long n, long n1, long size) {
    long to = n + AHEAD;
    return to < n1 ? (const char *)w + to * p->k * size : p->then + (to - n1) * p->k * size;
}

INL long size_of(int type) { return type == F32 ? 4 : type == F16 ? 2 : 1; }

/* Results n0 to n1 of all rows. `ask`: whether the item has still to ask may_write. */
static void panel_of(const Product *p, long n0, long n1, Worker *me, int ask) {
    const void *w = p->w;
    int type = p->type;
    long shift = 0, size = size_of(type);
    Sum sums[ROWS * SUM_STRIDE + 8];
    if (p->rows == 1) {
        long n = n0;
        for (; n + NR1 <= n1; n += NR1) CALL(type, eight, p, w, n, ahead_of(p, w, n, n1, size), sums + n - n0);
        for (; n < n1; n++) CALL(type, one, p, w, n, ahead_of(p, w, n, n1, size), 0, sums + n - n0);
        if (!ask || may_write(me)) finish(p, 0, n0, n1 - n0, sums);
        return;
    }
    if (ask && p->rows > ROWS) {
        if (!may_write(me)) return;
        ask = 0;
    }
    if (type == F16 && p->rows > 2 * ROWS) {  /* converted once for many rows */
        float *f = (float *)me->scratch;
        const uint16_t *h = (const uint16_t *)w + n0 * p->k;
        long count = (n1 - n0) * p->k, i = 0;
        for (; i + VL <= count; i += VL) store(f + i, load_half(h + i));
        for (; i < count; i++) f[i] = half_to_float(h[i]);
        w = f;
        shift = n0;
        type = F32;
        size = 4;
    }
    for (long m = 0; m < p->rows; m += ROWS) {
        int mr = p->rows - m < ROWS ? (int)(p->rows - m) : ROWS;
        long n = n0;
        /* Only the first rows of x wait for the weights: for the others they are in the cache. */
        for (; n + NR <= n1; n += NR) CALL(type, rows, p, w, n - shift, m || shift ? (const char *)w + (n - shift) * p->k * size : ahead_of(p, w, n, n1, size), mr, m, sums + n - n0);
        for (; n < n1; n++)
            for (int i = 0; i < mr; i++) CALL(type, one, p, w, n - shift, (const char *)w + (n - shift) * p->k * size, m + i, sums + i * SUM_STRIDE + n - n0);
        if (ask && !may_write(me)) return;
        for (int i = 0; i < mr; i++) finish(p, m + i, n0, n1 - n0, sums + i * SUM_STRIDE);
    }
}

/* `items` shared out to `groups` in stretches: how many a group has, and its first. */
INL long share(long items, long group, long groups) { return items / groups + (group < items % groups); }
INL long begin_of(long items, long group, long groups) { return group * (items / groups) + (group < items % groups ? group : items % groups); }

static void product_item(const void *ctx, long item, Worker *me) {
    Product mine = *(const Product *)ctx;
    const Product *p = &mine;
    /* Threads take tickets in turn, so a thread's tickets are mostly `limit` apart: these are neighbours in memory, and each thread reads a stretch of its own. */
    long threads = limit, group = item % threads, nth = item / threads, last = nth + 1 >= share(p->items, group, threads);
    item = begin_of(p->items, group, threads) + nth;
    long n0 = item * p->panel, n1 = n0 + p->panel < p->n ? n0 + p->panel : p->n, size = size_of(p->type);
    mine.then = !last ? (const char *)p->w + n1 * p->k * size : p->after ? p->after + begin_of(p->after_items, group, threads) * p->after_item : (const char *)p->w + n0 * p->k * size;
    if (p->how != SILU) {
        panel_of(p, n0, n1, me, 1);
        return;
    }
    /* gate rows n0..n1 and up rows n + n0..n + n1 of a weight [2 n, k]: silu(gate) * up, through a buffer a few rows of x at a time */
    float pair[2][64 * PANEL];
    if (p->rows > 64 && !may_write(me)) return;
    for (long m0 = 0; m0 < p->rows; m0 += 64) {
        long rows = p->rows - m0 < 64 ? p->rows - m0 : 64, width = n1 - n0;
        for (int half = 0; half < 2; half++) {
            long first = n0 + half * p->n;
            Product g = *p;
            g.how = STORE;
            g.rows = rows;
            g.w = (const char *)p->w + first * p->k * size;
            if (!half) g.then = (const char *)p->w + (n0 + p->n) * p->k * size;
            g.scale = p->scale ? p->scale + first : 0;
            g.bias = p->bias ? p->bias + first : 0;
            g.x = p->x ? p->x + m0 * p->x_stride : 0;
            g.q = p->q ? p->q + m0 * p->x_stride : 0;
            g.q_scale = p->q_scale ? p->q_scale + m0 : 0;
            g.y = pair[half];
            g.y_stride = width;
            panel_of(&g, 0, width, me, 0);
        }
        if (p->rows <= 64 && !may_write(me)) return;
        for (long m = 0; m < rows; m++) {
            float *y = p->y + (m0 + m) * p->y_stride + n0;
            const float *gate = pair[0] + m * width, *up = pair[1] + m * width;
            long n = 0;
            for (; n + VL <= width; n += VL) store(y + n, silu(load(gate + n)) * load(up + n));
            if (n < width) {
                float some[VL] = {0};
                for (long i = n; i < width; i++) some[i - n] = gate[i];
                store(some, silu(load(some)));
                for (long i = n; i < width; i++) y[i] = some[i - n] * up[i];
            }
        }
    }
}

/* Results of one work item: some 48 KB of weights, large enough to stream, small enough that nobody waits long for the last one. Many rows: as much as a core's cache holds. */
static long panel_size(int type, long rows, long k, int how) {
    long size = size_of(type), want = (rows > 2 * ROWS ? 96 << 10 : 48 << 10) / (k * (rows > 2 * ROWS && type == F16 ? 4 : size));
    want = want / 24 * 24;             /* a multiple of NR and of NR1 */
    if (want < 24) want = 24;
    /* Of a pair of products each half has half the bytes, and their results wait in a buffer. */
    if (want > PANEL) want = (how == SILU && rows > 2 * ROWS) || (type == F16 && rows > 2 * ROWS) ? 24 : how == SILU ? 48 : want > WIDEST ? WIDEST : want;
    if (type == F16 && rows > 2 * ROWS && (size_t)want * k * 4 > SCRATCH) want = SCRATCH / (4 * k);
    return want;
}

static void product(const Product *given) {
    Product p = *given;
    p.panel = panel_size(p.type, p.rows, p.k, p.how);
    p.items = (p.n + p.panel - 1) / p.panel;
    run(product_item, &p, sizeof p, p.items);
}

/* ---- rows ---- */

INL void norm_row(const float *x, const float *w, float *out, long n, float eps) {
    vf s = {0};
    long i = 0;
    float tail = 0;
    for (; i + VL <= n; i += VL) { vf v = load(x + i); s += v * v; }
    for (; i < n; i++) tail += x[i] * x[i];
    float r = 1.f / sqrtf((sum(s) + tail) / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(x + i) * splat(r) * load(w + i));
    for (; i < n; i++) out[i] = x[i] * r * w[i];
}

/* x as integers times a scale: the largest number of the row becomes the largest integer allowed. */
INL void quantise_row(const float *x, int16_t *q, float *scale, long n) {
    long levels = INT32_MAX / (127 * n);
    float top = 0, most = (float)(levels < 32767 ? levels : 32767);
    for (long i = 0; i < n; i++) { float a = fabsf(x[i]); top = a > top ? a : top; }
    float up = top > 0 ? most / top : 0.f;
    for (long i = 0; i < n; i++) q[i] = (int16_t)(x[i] * up + 12582912.f - 12582912.f);
    *scale = top / most;
}

typedef struct {
    const Model *m;
    const Step *s;
    const Layer *layer;
    float *residual, *x, *qkv, *y, *hidden, *cos, *sin, *q_scale;
    int16_t *q;
    const float *weight, *from;        /* of the norm or quantisation under way */
    long n, begin;
    int normed;
    const char *after;                 /* the weights that the pass reads next, their items, and the bytes of one */
    long after_items, after_item;
} Pass;

enum { CHUNK = 16 };

INL void each_row(item_fn fn, const Pass *a, long rows) {
    long items = (rows + CHUNK - 1) / CHUNK;
    if (items < 3) for (long i = 0; i < items; i++) fn(a, i, &pool.workers[0]);   /* not worth a helper */
    else run(fn, a, sizeof *a, items);
}

static void prepare_item(const void *ctx, long item, Worker *me) {
    if (!may_write(me)) return;
    const Pass *a = ctx;
    long end = (item + 1) * CHUNK < a->begin ? (item + 1) * CHUNK : a->begin;
    for (long t = item * CHUNK; t < end; t++) {
        const float *x = a->from + t * a->n;
        if (a->normed) { norm_row(x, a->weight, a->x + t * a->n, a->n, (float)a->m->eps); x = a->x + t * a->n; }
        if (a->m->weights == I8) quantise_row(x, a->q + t * a->n, a->q_scale + t, a->n);
    }
}

/* Rows of `from` made ready for a product: normed into x where a norm is given, quantised where the weights are. */
static void prepare(Pass *a, const float *from, const float *norm, long n, long rows) {
    a->from = from;
    a->weight = norm;
    a->normed = norm != 0;
    a->n = n;
    a->begin = rows;
    if (norm || a->m->weights == I8) each_row(prepare_item, a, rows);
}

static void apply(const Pass *a, const float *x, const void *w, const float *scale, const float *bias, float *y, long n, long k, long rows, int how) {
    int whole = a->m->weights == I8;
    Product p = {(int)a->m->weights, how, rows, n, k, 0, w, scale, bias, whole ? 0 : x, k, whole ? a->q : 0, whole ? a->q_scale : 0, y, n,
                 0, 0, a->after, a->after_items, a->after_item};
    product(&p);
}

INL void then(Pass *a, const void *w, long n, long k, long rows, int how) {
    long panel = panel_size((int)a->m->weights, rows, k, how);
    a->after = w;
    a->after_items = (n + panel - 1) / panel;
    a->after_item = panel * k * size_of((int)a->m->weights);
}

static void embed_row(const Model *m, int64_t id, float *out) {
    long c = m->hidden, i = 0;
    if (m->weights == F32) memcpy(out, (const float *)m->embed + id * c, c * 4);
    else if (m->weights == F16) for (; i < c; i++) out[i] = half_to_float(((const uint16_t *)m->embed)[id * c + i]);
    else for (; i < c; i++) out[i] = (float)((const int8_t *)m->embed)[id * c + i] * m->embed_scale[id];
}

static void begin_item(const void *ctx, long item, Worker *me) {
    if (!may_write(me)) return;
    const Pass *a = ctx;
    long half = a->m->head_dim / 2, end = (item + 1) * CHUNK < a->s->tokens ? (item + 1) * CHUNK : a->s->tokens;
    for (long t = item * CHUNK; t < end; t++) {
        embed_row(a->m, a->s->ids[t], a->residual + t * a->m->hidden);
        for (long i = 0; i < half; i++) {
            float angle = (float)a->s->positions[t] * a->m->freq[i];
            a->cos[t * half + i] = cosf(angle);
            a->sin[t * half + i] = sinf(angle);
        }
    }
}

/* x times Hadamard matrices of the largest power of two that divides n, along the diagonal (kv_store.hadamard), in place. */
INL void spread(float *x, long n) {
    long size = n & -n;
    float by = 1.f / sqrtf((float)size);
    for (float *end = x + n; x < end; x += size) {
        for (long half = 1; half < size; half *= 2)
            for (long i = 0; i < size; i += 2 * half)
                for (long j = i; j < i + half; j++) {
                    float a = x[j], b = x[j + half];
                    x[j] = a + b;
                    x[j + half] = a - b;
                }
        for (long i = 0; i < size; i++) x[i] *= by;
    }
}

/* n numbers as codes of 8 or 4 bits with a scale and, for 4 bits, a zero: kv_store.quantise. */
INL void put_codes(const float *x, long n, int kv, void *codes, uint16_t *scale, uint16_t *zero) {
    float low = 0, top = 0;
    if (kv == I4) {
        float least = x[0], most = x[0];
        for (long i = 1; i < n; i++) { least = x[i] < least ? x[i] : least; most = x[i] > most ? x[i] : most; }
        *zero = float_to_half(least);
        low = half_to_float(*zero);
        top = (most - low) / 15.f;
    } else {
        for (long i = 0; i < n; i++) { float a = fabsf(x[i]); top = a > top ? a : top; }
        top /= 127.f;
    }
    *scale = float_to_half(top);
    float by = half_to_float(*scale);
    by = by > 0 ? 1.f / by : 0.f;
    if (kv == I8) {
        int8_t *q = codes;
        for (long i = 0; i < n; i++) { float c = rintf(x[i] * by); q[i] = (int8_t)(c > 127.f ? 127.f : c < -127.f ? -127.f : c); }
        return;
    }
    uint8_t *q = codes;
    for (long i = 0; i < n / 2; i++) {
        float a = rintf((x[i] - low) * by), b = rintf((x[i + n / 2] - low) * by);
        a = a > 15.f ? 15.f : a < 0.f ? 0.f : a;
        b = b > 15.f ? 15.f : b < 0.f ? 0.f : b;
        q[i] = (uint8_t)((int)a | (int)b << 4);
    }
}

/* Queries and keys normed and turned in place, keys and values into their slots. */
static void turn_item(const void *ctx, long item, Worker *me) {
    if (!may_write(me)) return;
    const Pass *a = ctx;
    const Model *m = a->m;
    long d = m->head_dim, half = d / 2, width = (m->heads + 2 * m->kv_heads) * d, end = (item + 1) * CHUNK < a->s->tokens ? (item + 1) * CHUNK : a->s->tokens;
    for (long t = item * CHUNK; t < end; t++) {
        const float *c = a->cos + t * half, *s = a->sin + t * half;
        for (long h = 0; h < m->heads + m->kv_heads; h++) {
            float *x = a->qkv + t * width + h * d;
            const float *w = h < m->heads ? a->layer->q_norm : a->layer->k_norm;
            if (w) norm_row(x, w, x, d, (float)m->eps);
            for (long i = 0; i < half; i++) {
                float first = x[i], second = x[half + i];
                x[i] = first * c[i] - second * s[i];
                x[half + i] = second * c[i] + first * s[i];
            }
            if (m->kv == I4) spread(x, d);
        }
        int64_t slot = a->s->slots[t];
        if (slot < 0) continue;
        long blk = slot / m->block_size, off = slot % m->block_size;
        for (long h = 0; h < m->kv_heads; h++) {
            long place = (blk * m->kv_heads + h) * m->block_size + off, at = place * d;
            const Layer *l = a->layer;
            const float *k = a->qkv + t * width + (m->heads + h) * d, *v = k + m->kv_heads * d;
            if (m->kv == I8) {
                put_codes(k, d, I8, (int8_t *)l->k_cache + at, l->k_scale + place, 0);
                put_codes(v, d, I8, (int8_t *)l->v_cache + at, l->v_scale + place, 0);
            } else if (m->kv == I4) {
                put_codes(k, d, I4, (uint8_t *)l->k_cache + at / 2, l->k_scale + place, l->k_zero + place);
                put_codes(v, d, I4, (uint8_t *)l->v_cache + at / 2, l->v_scale + place, l->v_zero + place);
            } else if (m->kv == F16) for (long i = 0; i < d; i++) ((uint16_t *)a->layer->k_cache)[at + i] = float_to_half(k[i]), ((uint16_t *)a->layer->v_cache)[at + i] = float_to_half(v[i]);
            else memcpy((float *)a->layer->k_cache + at, k, d * 4), memcpy((float *)a->layer->v_cache + at, v, d * 4);
        }
    }
}

/* ---- attention ---- */

#define WIDE (VL == 16 ? 4 : 2)        /* vectors of a row that fit into registers beside the sums */

/* dp: head size rounded up to whole vectors. scores[r][t] = q[r] . k[t] */
INL void score_rows(long dp, const float *restrict q, long rows, const float *const *k, long keys, float *restrict scores) {
    for (long t = 0; t < keys; t += 4) {
        if (dp == 4 * VL && VL == 16) {  /* four keys stay in registers for all rows; the order of the additions is that of the loop below */
            vf a[4], b[4], c[4], d[4];
            UNROLL for (int i = 0; i < 4; i++) a[i] = load(k[t] + i * VL), b[i] = load(k[t + 1] + i * VL), c[i] = load(k[t + 2] + i * VL), d[i] = load(k[t + 3] + i * VL);
            for (long r = 0; r < rows; r++) {
                vf s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
                UNROLL for (int i = 0; i < 4; i++) { vf x = load(q + r * dp + i * VL); s0 += x * a[i]; s1 += x * b[i]; s2 += x * c[i]; s3 += x * d[i]; }
                sum4(s0, s1, s2, s3, scores + r * TILE + t);
            }
            continue;
        }
        for (long r = 0; r < rows; r++) {
            vf s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
            for (long i = 0; i < dp; i += VL) {
                vf x = load(q + r * dp + i);
                s0 += x * load(k[t] + i);
                s1 += x * load(k[t + 1] + i);
                s2 += x * load(k[t + 2] + i);
                s3 += x * load(k[t + 3] + i);
            }
            sum4(s0, s1, s2, s3, scores + r * TILE + t);
        }
    }
}

/* acc[r] += sum over t of p[r][t] v[t], for nr rows and nv vectors of each from i on. */
INL void add_some(int nr, int nv, long dp, long i, const float *restrict p, const float *const *v, long keys, float *restrict acc) {
    vf s[4 * WIDE];
    UNROLL for (int r = 0; r < nr; r++) UNROLL for (int j = 0; j < nv; j++) s[r * nv + j] = load(acc + r * dp + i + j * VL);
    for (long t = 0; t < keys; t++) {
        vf x[WIDE];
        UNROLL for (int j = 0; j < nv; j++) x[j] = load(v[t] + i + j * VL);
        UNROLL for (int r = 0; r < nr; r++) { vf w = splat(p[r * TILE + t]); UNROLL for (int j = 0; j < nv; j++) s[r * nv + j] += w * x[j]; }
    }
    UNROLL for (int r = 0; r < nr; r++) UNROLL for (int j = 0; j < nv; j++) store(acc + r * dp + i + j * VL, s[r * nv + j]);
}

INL void add_values(int nr, long dp, const float *p, const float *const *v, long keys, float *acc) {
    long i = 0;
    for (; i + WIDE * VL <= dp; i += WIDE * VL) add_some(nr, WIDE, dp, i, p, v, keys, acc);
    for (; i < dp; i += VL) add_some(nr, 1, dp, i, p, v, keys, acc);
}

/* Whole vectors of signed or unsigned bytes as integers of 32 bits. */
INL vi load_i8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi r;
    for (int i = 0; i < VL; i++) r[i] = p[i];
    return r;
#endif
}

INL vi load_u8(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi r;
    for (int i = 0; i < VL; i++) r[i] = p[i];
    return r;
#endif
}

/* d numbers from the cache as float32; `place` counts tokens and heads. */
INL void get_row(int kv, const void *cache, const uint16_t *scales, const uint16_t *zeros, long place, long d, float *to) {
    long i = 0, at = place * d;
    if (kv == F32) memcpy(to, (const float *)cache + at, d * 4);
    else if (kv == F16) {
        const uint16_t *h = (const uint16_t *)cache + at;
        for (; i + VL <= d; i += VL) store(to + i, load_half(h + i));
        for (; i < d; i++) to[i] = half_to_float(h[i]);
    } else if (kv == I8) {
        const int8_t *q = (const int8_t *)cache + at;
        float scale = half_to_float(scales[place]);
        for (; i + VL <= d; i += VL) store(to + i, __builtin_convertvector(load_i8(q + i), vf) * splat(scale));
        for (; i < d; i++) to[i] = (float)q[i] * scale;
    } else {
        const uint8_t *q = (const uint8_t *)cache + at / 2;
        float scale = half_to_float(scales[place]), zero = half_to_float(zeros[place]);
        for (; i + VL <= d / 2; i += VL) {
            vi both = load_u8(q + i);
            store(to + i, __builtin_convertvector(both & 15, vf) * splat(scale) + splat(zero));
            store(to + d / 2 + i, __builtin_convertvector(both >> 4, vf) * splat(scale) + splat(zero));
        }
        for (; i < d / 2; i++) {
            to[i] = fmaf((float)(q[i] & 15), scale, zero);
            to[d / 2 + i] = fmaf((float)(q[i] >> 4), scale, zero);
        }
    }
}

INL void attend(const Pass *a, long b, long head, long first, Worker *me, long d, int kv) {
    const Model *m = a->m;
    long group = m->heads / m->kv_heads, width = (m->heads + 2 * m->kv_heads) * d, dp = (d + VL - 1) / VL * VL, window = a->layer->window, sinks = window ? m->sinks : 0;
    long begin = a->s->starts[b], queries = a->s->starts[b + 1] - begin, length = a->s->lens[b], per = group > QROWS ? 1 : QROWS / group;
    long count = queries - first < per ? queries - first : per, rows = count * group, at0 = length - queries + first, last = at0 + count - 1;
    const int32_t *table = a->s->table + b * a->s->table_width;
    float *q = (float *)me->scratch, *acc = q + rows * dp, *scores = acc + rows * dp, *kf = scores + rows * TILE, *vf_ = kf + TILE * dp, *top = vf_ + TILE * dp, *total = top + rows;
    memset(q, 0, (size_t)2 * rows * dp * 4);
    for (long r = 0; r < rows; r++) {
        const float *x = a->qkv + (begin + first + r / group) * width + (head * group + r % group) * d;
        for (long i = 0; i < d; i++) q[r * dp + i] = x[i] * (float)m->scale;
        top[r] = -1e30f;
        total[r] = 0;
    }
    int copy = kv != F32 || dp != d;   /* else rows are used where they lie */
    long size = kv == F32 ? d * 4 : kv == F16 ? d * 2 : kv == I8 ? d : d / 2;
    if (dp != d) memset(kf, 0, (size_t)2 * TILE * dp * 4);
    /* The tiles that hold sinks, then those from the first query's window on. */
    long from = window && at0 - window + 1 > 0 ? (at0 - window + 1) / TILE * TILE : 0;
    for (long t0 = sinks ? 0 : from; t0 <= last; t0 = t0 + TILE >= sinks && t0 + TILE < from ? from : t0 + TILE) {
        long keys = last + 1 - t0 < TILE ? last + 1 - t0 : TILE;
        const float *k[TILE + 4], *v[TILE + 4];
        for (long t = 0; t < keys; t++) {
            long p = t0 + t, blk = table[p / m->block_size], off = p % m->block_size;
            k[t] = kf + t * dp;
            v[t] = vf_ + t * dp;
            /* Left of the window blocks may be gone: such keys are not seen by any of these queries. */
            if (blk < 0 || (window && p < at0 - window + 1 && p >= sinks)) { memset(kf + t * dp, 0, dp * 4); memset(vf_ + t * dp, 0, dp * 4); continue; }
            long place = (blk * m->kv_heads + head) * m->block_size + off;
            if (p + TILE <= last) {  /* the next tile is on its way while this one is worked on */
                long next = p + TILE, there = (((long)table[next / m->block_size] * m->kv_heads + head) * m->block_size + next % m->block_size) * size;
                for (long i = 0; i < size; i += 64) __builtin_prefetch((const char *)a->layer->k_cache + there + i), __builtin_prefetch((const char *)a->layer->v_cache + there + i);
            }
            if (copy) {
                get_row(kv, a->layer->k_cache, a->layer->k_scale, a->layer->k_zero, place, d, kf + t * dp);
                get_row(kv, a->layer->v_cache, a->layer->v_scale, a->layer->v_zero, place, d, vf_ + t * dp);
            } else {
                k[t] = (const float *)a->layer->k_cache + place * d;
                v[t] = (const float *)a->layer->v_cache + place * d;
            }
        }
        for (long t = keys; t % 4; t++) k[t] = k[keys - 1];   /* scored, then masked */
        score_rows(dp, q, rows, k, keys, scores);
        for (long r = 0; r < rows; r++) {
            long at = at0 + r / group, lo = window && at - window + 1 > t0 ? at - window + 1 - t0 : 0, hi = at + 1 - t0;
            float *s = scores + r * TILE, big = top[r];
            if (hi > keys) hi = keys;
            if (lo > 0 || hi < TILE) for (long t = 0; t < TILE; t++) s[t] = (t >= lo || t0 + t < sinks) && t < hi ? s[t] : -INFINITY;
            vf most = load(s);
            for (long t = VL; t < TILE; t += VL) { vf e = load(s + t); vi more = e > most; most = (vf)(((vi)e & more) | ((vi)most & ~more)); }
            for (int i = 0; i < VL; i++) big = most[i] > big ? most[i] : big;
            vf more = {0}, shift = splat(big), shrink = vexp(splat(top[r] - big));
            for (long t = 0; t < TILE; t += VL) { vf e = vexp(load(s + t) - shift); store(s + t, e); more += e; }
            total[r] = total[r] * shrink[0] + sum(more);
            if (big != top[r]) for (long i = 0; i < dp; i += VL) store(acc + r * dp + i, load(acc + r * dp + i) * shrink);
            top[r] = big;
        }
        for (long r = 0; r < rows; r += 4)
            switch (rows - r) {
                case 1: add_values(1, dp, scores + r * TILE, v, keys, acc + r * dp); break;
                case 2: add_values(2, dp, scores + r * TILE, v, keys, acc + r * dp); break;
                case 3: add_values(3, dp, scores + r * TILE, v, keys, acc + r * dp); break;
                default: add_values(4, dp, scores + r * TILE, v, keys, acc + r * dp); break;
            }
    }
    if (!may_write(me)) return;
    for (long r = 0; r < rows; r++) {
        float *y = a->y + (begin + first + r / group) * m->heads * d + (head * group + r % group) * d, by = 1.f / total[r];
        for (long i = 0; i < d; i++) y[i] = acc[r * dp + i] * by;
    }
}

static void attention_item(const void *ctx, long item, Worker *me) {
    const Pass *a = ctx;
    const int32_t *starts = a->s->starts;
    long head = item % a->m->kv_heads, tile = item / a->m->kv_heads, b = 0, d = a->m->head_dim, per = QROWS / (a->m->heads / a->m->kv_heads);
    for (long tiles; tile >= (tiles = (starts[b + 1] - starts[b] + per - 1) / per); b++) tile -= tiles;
    switch (a->m->kv) {
#define WITH_KV(kv) case kv: if (d == 64) attend(a, b, head, tile * per, me, 64, kv); else attend(a, b, head, tile * per, me, d, kv); break;
        WITH_KV(F32) WITH_KV(F16) WITH_KV(I8) WITH_KV(I4)
    }
}

/* ---- the pass ---- */

enum { SLAB = 512 };                   /* rows of the MLP at once: bounds its memory */

INL void mark(int64_t **at, int part) {
    if (!*at) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(*at)++ = part;
    *(*at)++ = now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Pairs of marks that a pass over so many tokens makes. */
int64_t cbviz_marks(const Model *m, int64_t tokens) { return 3 + m->num_layers * (4 + 2 * ((tokens + SLAB - 1) / SLAB)); }

#define TAKE(pointer, count) do { size_t bytes_ = ((size_t)(count) * sizeof *(pointer) + 63) / 64 * 64; if (memory) (pointer) = (void *)((char *)memory + used); used += bytes_; } while (0)

static size_t layout(const Model *m, long tokens, long sampled, Pass *a, char *memory) {
    size_t used = 0;
    long slab = tokens < SLAB ? tokens : SLAB, most = sampled > tokens ? sampled : tokens, wide = m->hidden > m->heads * m->head_dim ? m->hidden : m->heads * m->head_dim;
    long numbers = most * wide, inner = slab * m->inter;
    TAKE(a->residual, tokens * m->hidden);
    TAKE(a->x, most * m->hidden);
    TAKE(a->qkv, tokens * (m->heads + 2 * m->kv_heads) * m->head_dim);
    TAKE(a->y, (tokens > sampled ? tokens : sampled) * wide);
    TAKE(a->hidden, slab * m->inter);
    TAKE(a->cos, tokens * m->head_dim / 2);
    TAKE(a->sin, tokens * m->head_dim / 2);
    if (m->weights == I8) {
        TAKE(a->q, numbers > inner ? numbers : inner);
        TAKE(a->q_scale, most);
    }
    return used;
}

/* Bytes of memory that `cbviz_forward` needs. */
int64_t cbviz_memory(const Model *m, int64_t tokens, int64_t sampled) {
    Pass a;
    return (int64_t)layout(m, tokens, sampled, &a, 0);
}

/* Whether these shapes fit. */
int64_t cbviz_fits(const Model *m) {
    long group = m->heads / m->kv_heads;
    return m->head_dim <= MAX_DIM && group <= QROWS && m->hidden <= MAX_K && m->inter <= MAX_K && m->heads * m->head_dim <= MAX_K;
}

/* What the compiler was allowed to use. */
const char *cbviz_features(void) {
    return
#if defined(__AVX512VNNI__)
        "AVX-512 VNNI";
#elif defined(__AVX512F__)
        "AVX-512";
#elif defined(__AVXVNNI__)
        "AVX2 VNNI";
#elif defined(__AVX2__)
        "AVX2";
#elif defined(__ARM_NEON)
        "NEON";
#else
        "no vector instructions known here";
#endif
}

/* One pass: all tokens computed, their KV written, logits [sampled, vocab] of the rows asked for. `memory` as cbviz_memory says, aligned to 64. 0, or 1 without memory. */
int64_t cbviz_forward(const Model *m, const Step *s, char *memory) {
    pthread_mutex_lock(&pool.run);
    if (!ready((int)m->threads)) { pthread_mutex_unlock(&pool.run); return 1; }
    int64_t *at = s->marks;
    mark(&at, BEGIN);
    Pass a = {.m = m, .s = s};
    layout(m, s->tokens, s->sampled, &a, memory);
    long t = s->tokens, c = m->hidden, d = m->head_dim, qs = m->heads * d, width = qs + 2 * m->kv_heads * d, group = m->heads / m->kv_heads, per = QROWS / group, tiles = 0;
    for (long b = 0; b < s->sequences; b++) tiles += (s->starts[b + 1] - s->starts[b] + per - 1) / per;
    each_row(begin_item, &a, t);
    mark(&at, EMBED);
    long kept = s->starts[s->sequences];
    for (long l = 0; l < m->num_layers; l++) {
        const Layer *w = a.layer = &m->layers[l];
        prepare(&a, a.residual, w->attn_norm, c, t);
        then(&a, w->o, c, qs, t, ADD);
        apply(&a, a.x, w->qkv, w->qkv_scale, w->qkv_bias, a.qkv, width, c, t, STORE);
        mark(&at, QKV);
        /* All KV of the layer is in place before anybody attends: a sequence may use blocks that another computes in this step. */
        each_row(turn_item, &a, t);
        mark(&at, ROPE_KV);
        run(attention_item, &a, sizeof a, tiles * m->kv_heads);
        mark(&at, ATTENTION);
        memset(a.y + kept * qs, 0, (size_t)(t - kept) * qs * 4);
        prepare(&a, a.y, 0, qs, t);
        then(&a, w->gate_up, m->inter, c, t, SILU);
        apply(&a, a.y, w->o, w->o_scale, w->o_bias, a.residual, c, qs, t, ADD);
        mark(&at, OUT);
        for (long m0 = 0; m0 < t; m0 += SLAB) {
            long rows = t - m0 < SLAB ? t - m0 : SLAB;
            prepare(&a, a.residual + m0 * c, w->mlp_norm, c, rows);
            then(&a, w->down, c, m->inter, rows, ADD);
            apply(&a, a.x, w->gate_up, w->gate_up_scale, w->gate_up_bias, a.hidden, m->inter, c, rows, SILU);
            mark(&at, GATE_UP);
            prepare(&a, a.hidden, 0, m->inter, rows);
            if (l + 1 < m->num_layers) then(&a, m->layers[l + 1].qkv, width, c, t, STORE);
            else then(&a, s->sampled ? m->head : 0, m->vocab, c, s->sampled, STORE);
            apply(&a, a.hidden, w->down, w->down_scale, w->down_bias, a.residual + m0 * c, c, m->inter, rows, ADD);
            mark(&at, DOWN);
        }
    }
    if (s->sampled) {
        for (long i = 0; i < s->sampled; i++) memcpy(a.y + i * c, a.residual + s->rows[i] * c, c * 4);
        prepare(&a, a.y, m->norm, c, s->sampled);
        then(&a, 0, 0, c, s->sampled, STORE);
        apply(&a, a.x, m->head, m->head_scale, 0, s->logits, m->vocab, c, s->sampled, STORE);
        mark(&at, HEAD);
    }
    pthread_mutex_unlock(&pool.run);
    return 0;
}

/* Whether no helper reads any more what a pass or a choice was given. */
int64_t cbviz_quiet(void) {
    for (int i = 1; i <= pool.helpers; i++)
        if (atomic_load(&pool.workers[i].state) == TAKEN_OVER) return 0;
    return 1;
}

_Static_assert(sizeof(Pass) <= 256 && sizeof(Product) <= 256, "arguments of a job");

typedef struct { const float *logits; long vocab; int64_t *best; float *gap, *log_total; } Choice;

static void choose_item(const void *ctx, long row, Worker *me) {
    const Choice *c = ctx;
    const float *x = c->logits + row * c->vocab;
    float first = -INFINITY, second = -INFINITY;
    int64_t at = 0;
    for (long i0 = 0; i0 < c->vocab; i0 += 1024) {  /* blocks without anything above the runner-up are only looked through */
        long i1 = i0 + 1024 < c->vocab ? i0 + 1024 : c->vocab, i = i0;
        vf top = splat(-INFINITY);
        for (; i + VL <= i1; i += VL) { vf v = load(x + i); vi more = v > top; top = (vf)(((vi)v & more) | ((vi)top & ~more)); }
        float big = -INFINITY;
        for (int j = 0; j < VL; j++) big = top[j] > big ? top[j] : big;
        for (; i < i1; i++) big = x[i] > big ? x[i] : big;
        if (big <= second) continue;
        for (i = i0; i < i1; i++)
            if (x[i] > first) second = first, first = x[i], at = i;
            else if (x[i] > second) second = x[i];
    }
    double total = 0;
    vf shift = splat(first);
    for (long i0 = 0; i0 < c->vocab; i0 += 1024) {
        long i1 = i0 + 1024 < c->vocab ? i0 + 1024 : c->vocab, i = i0;
        vf s = {0};
        for (; i + VL <= i1; i += VL) s += vexp(load(x + i) - shift);
        total += sum(s);
        for (; i < i1; i++) total += exp((double)x[i] - first);
    }
    if (!may_write(me)) return;
    c->best[row] = at;
    c->gap[row] = c->vocab > 1 ? first - second : 0;
    c->log_total[row] = first + (float)log(total);
}

/* Of each row of logits [rows, vocab]: the best (ties: the smaller id), its lead over the second, and the logarithm of the sum of exponentials. */
int64_t cbviz_choose(const float *logits, int64_t rows, int64_t vocab, int64_t threads, int64_t *best, float *gap, float *log_total) {
    pthread_mutex_lock(&pool.run);
    if (!ready((int)threads)) { pthread_mutex_unlock(&pool.run); return 1; }
    Choice c = {logits, vocab, best, gap, log_total};
    run(choose_item, &c, sizeof c, rows);
    pthread_mutex_unlock(&pool.run);
    return 0;
}
