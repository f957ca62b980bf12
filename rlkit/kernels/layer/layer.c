/* A dense decoder layer on the CPU, in fp32; __init__.py and halves.py have the formulas.

   Every array is contiguous. Rows are divided over threads in order, so that equal calls give equal bits: a sum over
   rows is added up per thread in `parts`, [threads, width], and then in the order of the threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t size;

#define VECTOR _Pragma("omp simd") /* no two of its arrays overlap */
#define EACH_ROW _Pragma("omp parallel for schedule(static) num_threads(threads)")

/* e^x to 2 units in the last place for |x| < 87, beyond that as at the border; NaN stays NaN. */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f; /* Cephes' expf */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1) * power.value;
}

static inline float dot(const float *restrict a, const float *restrict b, size n) {
    float sum = 0;
    for (size i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_scaled(float *restrict out, const float *restrict x, float scale, size n) {
    for (size i = 0; i < n; i++) out[i] += scale * x[i];
}

static void add_parts(float *restrict out, const float *restrict parts, size width, int threads) {
    memset(out, 0, width * sizeof(float));
    for (int t = 0; t < threads; t++) add_scaled(out, parts + t * width, 1, width);
}

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* out = x * scale * weight, scale = 1 / sqrt(mean(x^2) + eps) of each row */
void rms_norm(const float *x, const float *weight, float eps, float *out, float *scale, size rows, size width,
              int threads) {
    EACH_ROW
    for (size r = 0; r < rows; r++) {
        const float *restrict a = x + r * width;
        float *restrict o = out + r * width, s = 1 / sqrtf(dot(a, a, width) / width + eps);
        scale[r] = s;
        VECTOR
        for (size i = 0; i < width; i++) o[i] = a[i] * s * weight[i];
    }
}

/* dx = scale * (g - n * mean(g * n)) + residual with g = grad * weight and n = x * scale; and the forward's output */
void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *scale,
                       const float *residual, float *dx, float *d_weight, float *out, float *parts, size rows,
                       size width, int threads) {
    memset(parts, 0, threads * width * sizeof(float));
    EACH_ROW
    for (size r = 0; r < rows; r++) {
        const float *restrict a = x + r * width, *restrict g = grad + r * width, *restrict add = residual + r * width;
        float *restrict d = dx + r * width, *restrict o = out + r * width;
        float *restrict part = parts + omp_get_thread_num() * width, s = scale[r], along = 0;
        for (size i = 0; i < width; i++) along += g[i] * weight[i] * a[i];
        along *= s * s / width;
        VECTOR
        for (size i = 0; i < width; i++) {
            part[i] += g[i] * a[i] * s;
            o[i] = a[i] * s * weight[i];
            d[i] = s * (g[i] * weight[i] - a[i] * along) + add[i];
        }
    }
    add_parts(d_weight, parts, width, threads);
}

/* silu(gate) * up, whose rows begin every `stride` numbers; out may be gate */
static void swiglu(const float *gate, const float *up, size stride, float *out, size rows, size width,
                   int threads) {
    EACH_ROW
    for (size r = 0; r < rows; r++) {
        const float *g = gate + r * stride, *u = up + r * stride;
        float *o = out + r * width;
        VECTOR
        for (size i = 0; i < width; i++) o[i] = g[i] / (1 + exp_(-g[i])) * u[i];
    }
}

/* the gradients, with rows as those of gate and up, and the forward's output */
static void swiglu_backward(const float *grad, const float *gate, const float *up, size stride, float *d_gate,
                            float *d_up, float *out, size rows, size width, int threads) {
    EACH_ROW
    for (size r = 0; r < rows; r++) {
        const float *restrict g = gate + r * stride, *restrict u = up + r * stride, *restrict d = grad + r * width;
        float *restrict dg = d_gate + r * stride, *restrict du = d_up + r * stride, *restrict o = out + r * width;
        VECTOR
        for (size i = 0; i < width; i++) {
            float s = 1 / (1 + exp_(-g[i])), silu = g[i] * s;
            o[i] = silu * u[i];
            du[i] = d[i] * silu;
            dg[i] = d[i] * u[i] * (s + silu * (1 - s));
        }
    }
}

/* One head: normed by `norm` (or not, if null), then turned by the angles whose cos, and sin with the sign of its half,
   are given. */
static inline void turn(const float *restrict x, const float *norm, float eps, const float *restrict cos,
                        const float *restrict sin, float *restrict out, size n) {
    size half = n / 2;
    float s = norm ? 1 / sqrtf(dot(x, x, n) / n + eps) : 1, y[n];
    for (size i = 0; i < n; i++) y[i] = norm ? x[i] * s * norm[i] : x[i];
    VECTOR
    for (size i = 0; i < half; i++) {
        out[i] = y[i] * cos[i] + y[i + half] * sin[i];
        out[i + half] = y[i + half] * cos[i + half] + y[i] * sin[i + half];
    }
}

/* Each head of each row; the rows of x begin every `stride` numbers, those of out are dense. */
void rotary(const float *x, size stride, const float *norm, float eps, const float *cos, const float *sin, float *out,
            size rows, size heads, size n, int threads) {
    EACH_ROW
    for (size r = 0; r < rows; r++)
        for (size h = 0; h < heads; h++)
            turn(x + r * stride + h * n, norm, eps, cos + r * n, sin + r * n, out + (r * heads + h) * n, n);
}

/* dx, with rows as those of x, and d_norm from the gradient [rows, heads, n] of `rotary` */
void rotary_backward(const float *grad, const float *x, size stride, const float *norm, float eps, const float *cos,
                     const float *sin, float *dx, float *d_norm, float *parts, size rows, size heads, size n,
                     int threads) {
    size half = n / 2;
    memset(parts, 0, threads * n * sizeof(float));
    EACH_ROW
    for (size r = 0; r < rows; r++) {
        const float *restrict c = cos + r * n, *restrict s = sin + r * n;
        float *restrict part = parts + omp_get_thread_num() * n;
        for (size h = 0; h < heads; h++) {
            const float *restrict g = grad + (r * heads + h) * n, *restrict a = x + r * stride + h * n;
            float *restrict d = dx + r * stride + h * n, y[n];
            VECTOR
            for (size i = 0; i < half; i++) {
                y[i] = g[i] * c[i] + g[i + half] * s[i + half];
                y[i + half] = g[i + half] * c[i + half] + g[i] * s[i];
            }
            if (!norm) {
                memcpy(d, y, n * sizeof(float));
                continue;
            }
            float scale = 1 / sqrtf(dot(a, a, n) / n + eps), along = 0;
            VECTOR
            for (size i = 0; i < n; i++) {
                part[i] += y[i] * a[i] * scale;
                y[i] *= norm[i];
            }
            along = dot(y, a, n) * scale * scale / n;
            for (size i = 0; i < n; i++) d[i] = scale * (y[i] - a[i] * along);
        }
    }
    if (norm) add_parts(d_norm, parts, n, threads);
}

/* One new token per row: its key and value go to place positions[r] of the row's lanes, keys [rows, kv_heads, n, length]
   and values [rows, kv_heads, length, n]; its queries attend to all places up to that one. cos and sin are tables. */
static void decode_attention(const float *q, const float *k, const float *v, const float *q_norm, const float *k_norm,
                             float eps, const float *cos, const float *sin, const size *positions, float *keys,
                             float *values, float *out, size rows, size heads, size kv_heads, size n, size length,
                             int threads) {
    size group = heads / kv_heads;
    float factor = 1 / sqrtf(n);
    EACH_ROW
    for (size lane = 0; lane < rows * kv_heads; lane++) {
        size place = positions[lane / kv_heads], places = place + 1;
        const float *restrict c = cos + place * n, *restrict s = sin + place * n;
        float *restrict lane_k = keys + lane * n * length, *restrict lane_v = values + lane * n * length;
        float turned[n], probs[places];
        turn(k + lane * n, k_norm, eps, c, s, turned, n);
        for (size i = 0; i < n; i++) lane_k[i * length + place] = turned[i];
        memcpy(lane_v + place * n, v + lane * n, n * sizeof(float));
        for (size head = lane * group; head < (lane + 1) * group; head++) {
            float *restrict o = out + head * n, most = -INFINITY, sum = 0;
            turn(q + head * n, q_norm, eps, c, s, turned, n);
            memset(probs, 0, places * sizeof(float));
            for (size i = 0; i < n; i++) add_scaled(probs, lane_k + i * length, turned[i], places);
            for (size j = 0; j < places; j++) most = probs[j] > most ? probs[j] : most;
            for (size j = 0; j < places; j++) {
                probs[j] = exp_((probs[j] - most) * factor);
                sum += probs[j];
            }
            memset(o, 0, n * sizeof(float));
            for (size j = 0; j < places; j++) add_scaled(o, lane_v + j * n, probs[j] / sum, n);
        }
    }
}

/* BLAS: column by column, so that its matrices are the transposed ones of ours */
typedef void gemm(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                  const int *, const float *, const int *, const float *, float *, const int *);

static const float zero = 0, one = 1;

/* out [rows, n], whose rows begin every `stride` numbers, = x [rows, k] weight^T + bias, or with `add` that plus out */
static void linear(gemm *multiply, const float *x, const float *weight, const float *bias, int add, float *out,
                   int stride, int rows, int n, int k) {
    for (int r = 0; bias && r < rows; r++) {
        if (add) add_scaled(out + (size)r * stride, bias, 1, n);
        else memcpy(out + (size)r * stride, bias, n * sizeof(float));
    }
    multiply("T", "N", &n, &rows, &k, &one, weight, &k, x, &k, add || bias ? &one : &zero, out, &stride);
}

/* dx [rows, k] = grad weight, or with `add` that plus dx; grad [rows, n] has rows every `stride` numbers */
static void linear_backward(gemm *multiply, const float *grad, int stride, const float *weight, int add, float *dx,
                            int rows, int n, int k) {
    multiply("N", "N", &k, &rows, &n, &one, weight, &k, grad, &stride, add ? &one : &zero, dx, &k);
}

/* d_weight [n, k] = grad^T x, and d_bias the sum of the rows of grad [rows, n], if it is not null */
static void weight_gradient(gemm *multiply, const float *grad, const float *x, float *d_weight, float *d_bias,
                            int rows, int n, int k) {
    multiply("N", "T", &k, &n, &rows, &one, x, &k, grad, &n, &zero, d_weight, &k);
    if (d_bias) add_parts(d_bias, grad, n, rows);
}

/* Of a layer: weights or their gradients. Biases and the norms of queries and keys are null where there are none. */
typedef struct {
    float *norm, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias, *mlp_norm, *gate, *up, *down;
    float *keys, *values; /* of `decode_attention`; in `decode` only */
} Layer;

/* The first half of a layer: h = norm(x) with its scale, y [rows, (heads + 2 kv_heads) n] = queries | keys | values of h,
   q and k = the first two, turned. */
void project(gemm *multiply, const Layer *l, const float *x, const float *cos, const float *sin, float eps, float *h,
             float *scale, float *y, float *q, float *k, size rows, size width, size heads, size kv_heads, size n,
             int threads) {
    size all = (heads + 2 * kv_heads) * n, to_k = heads * n, to_v = to_k + kv_heads * n;
    rms_norm(x, l->norm, eps, h, scale, rows, width, threads);
    linear(multiply, h, l->q, l->q_bias, 0, y, all, rows, to_k, width);
    linear(multiply, h, l->k, l->k_bias, 0, y + to_k, all, rows, to_v - to_k, width);
    linear(multiply, h, l->v, l->v_bias, 0, y + to_v, all, rows, to_v - to_k, width);
    rotary(y, all, l->q_norm, eps, cos, sin, q, rows, heads, n, threads);
    rotary(y + to_k, all, l->k_norm, eps, cos, sin, k, rows, kv_heads, n, threads);
}

/* dx and d from the gradients of q, k, v and `residual`, that of x from elsewhere. In d those of the weights of q, k and
   v follow each other, as do those of their biases. work has rows * (2 width + (heads + 2 kv_heads) n) + threads *
   max(width, n) numbers. */
void project_backward(gemm *multiply, const Layer *l, const Layer *d, const float *x, const float *scale,
                      const float *y, const float *cos, const float *sin, float eps, const float *dq, const float *dk,
                      const float *dv, const float *residual, float *dx, float *work, size rows, size width,
                      size heads, size kv_heads, size n, int threads) {
    size all = (heads + 2 * kv_heads) * n, to_k = heads * n, to_v = to_k + kv_heads * n, of_v = all - to_v;
    float *dy = work, *dh = dy + rows * all, *h = dh + rows * width, *parts = h + rows * width;
    rotary_backward(dq, y, all, l->q_norm, eps, cos, sin, dy, d->q_norm, parts, rows, heads, n, threads);
    rotary_backward(dk, y + to_k, all, l->k_norm, eps, cos, sin, dy + to_k, d->k_norm, parts, rows, kv_heads, n,
                    threads);
    for (size r = 0; r < rows; r++) memcpy(dy + r * all + to_v, dv + r * of_v, of_v * sizeof(float));
    linear_backward(multiply, dy, all, l->q, 0, dh, rows, to_k, width);
    linear_backward(multiply, dy + to_k, all, l->k, 1, dh, rows, of_v, width);
    linear_backward(multiply, dy + to_v, all, l->v, 1, dh, rows, of_v, width);
    rms_norm_backward(dh, x, l->norm, scale, residual, dx, d->norm, h, parts, rows, width, threads);
    weight_gradient(multiply, dy, h, d->q, d->q_bias, rows, all, width);
}

/* The second half: y = x + attended o^T, then z = y + (silu(gate) * up) down^T with gate | up [rows, 2 hidden] of
   norm(y), whose scale is kept. work has rows * (width + hidden) numbers. */
void finish(gemm *multiply, const Layer *l, const float *x, const float *attended, float eps, float *y, float *scale,
            float *gate_up, float *z, float *work, size rows, size width, size inner, size hidden, int threads) {
    float *h = work, *activated = h + rows * width;
    memcpy(y, x, rows * width * sizeof(float));
    linear(multiply, attended, l->o, l->o_bias, 1, y, width, rows, width, inner);
    rms_norm(y, l->mlp_norm, eps, h, scale, rows, width, threads);
    linear(multiply, h, l->gate, NULL, 0, gate_up, 2 * hidden, rows, hidden, width);
    linear(multiply, h, l->up, NULL, 0, gate_up + hidden, 2 * hidden, rows, hidden, width);
    swiglu(gate_up, gate_up + hidden, 2 * hidden, activated, rows, hidden, threads);
    memcpy(z, y, rows * width * sizeof(float));
    linear(multiply, activated, l->down, NULL, 1, z, width, rows, width, hidden);
}

/* dx, d_attended and d from the gradient of z. In d that of up follows that of gate. work has rows * (2 width + 4 hidden)
   + threads * width numbers. */
void finish_backward(gemm *multiply, const Layer *l, const Layer *d, const float *attended, const float *y,
                     const float *scale, const float *gate_up, const float *dz, float *dx, float *d_attended,
                     float *work, size rows, size width, size inner, size hidden, int threads) {
    float *grad = work, *d_gate_up = grad + rows * hidden, *activated = d_gate_up + 2 * rows * hidden;
    float *dh = activated + rows * hidden, *h = dh + rows * width, *parts = h + rows * width;
    linear_backward(multiply, dz, width, l->down, 0, grad, rows, width, hidden);
    swiglu_backward(grad, gate_up, gate_up + hidden, 2 * hidden, d_gate_up, d_gate_up + hidden, activated, rows, hidden,
                    threads);
    weight_gradient(multiply, dz, activated, d->down, NULL, rows, width, hidden);
    linear_backward(multiply, d_gate_up, 2 * hidden, l->gate, 0, dh, rows, hidden, width);
    linear_backward(multiply, d_gate_up + hidden, 2 * hidden, l->up, 1, dh, rows, hidden, width);
    rms_norm_backward(dh, y, l->mlp_norm, scale, dz, dx, d->mlp_norm, h, parts, rows, width, threads);
    weight_gradient(multiply, d_gate_up, h, d->gate, NULL, rows, 2 * hidden, width);
    linear_backward(multiply, dx, width, l->o, 0, d_attended, rows, width, inner);
    weight_gradient(multiply, dx, attended, d->o, d->o_bias, rows, width, inner);
}

/* All layers of a decoder for one new token per row: x [rows, width] in place. work has rows * (2 width + 2 hidden +
   (2 heads + 2 kv_heads) n + 1) numbers. */
void decode(gemm *multiply, const Layer *layers, size num_layers, float *x, const size *positions, const float *cos,
            const float *sin, float eps, float *work, size rows, size width, size hidden, size heads, size kv_heads,
            size n, size length, int threads) {
    float *h = work, *q = h + rows * width, *k = q + rows * heads * n, *v = k + rows * kv_heads * n;
    float *out = v + rows * kv_heads * n, *gate = out + rows * heads * n, *up = gate + rows * hidden;
    float *scale = up + rows * hidden;
    int wide = width, many = rows, inner = hidden;
    for (const Layer *l = layers; l < layers + num_layers; l++) {
        rms_norm(x, l->norm, eps, h, scale, rows, width, 1);
        linear(multiply, h, l->q, l->q_bias, 0, q, heads * n, rows, heads * n, width);
        linear(multiply, h, l->k, l->k_bias, 0, k, kv_heads * n, rows, kv_heads * n, width);
        linear(multiply, h, l->v, l->v_bias, 0, v, kv_heads * n, rows, kv_heads * n, width);
        decode_attention(q, k, v, l->q_norm, l->k_norm, eps, cos, sin, positions, l->keys, l->values, out, rows, heads,
                         kv_heads, n, length, threads);
        linear(multiply, out, l->o, l->o_bias, 1, x, width, rows, width, heads * n);
        rms_norm(x, l->mlp_norm, eps, h, scale, rows, width, 1);
        /* gate and up as [hidden, rows]: this way round products with few rows take up to 1.4 times less */
        multiply("T", "N", &many, &inner, &wide, &one, h, &wide, l->gate, &wide, &zero, gate, &many);
        multiply("T", "N", &many, &inner, &wide, &one, h, &wide, l->up, &wide, &zero, up, &many);
        swiglu(gate, up, rows, gate, hidden, rows, threads);
        multiply("T", "T", &wide, &many, &inner, &one, l->down, &inner, gate, &many, &one, x, &wide);
    }
}

/* A span of `columns` numbers: its first query, their number a, that of its keys b, the place of its probabilities divided
   by the heads, and ranges (first, number) of key rows. Query i of a span sees its first b - a + i + 1 keys. */
#define EACH_KEY(span, columns, limit) \
    for (size range = 4, j = 0; range < (columns) && j < (limit); range += 2) \
        for (size key = (span)[range], end = key + (span)[range + 1]; key < end && j < (limit); key++, j++)

/* Softmax attention of the queries of all spans: q and out [T, heads, n], k [S, kv_heads, n], v likewise but with rows
   every `v_stride` numbers. Rows of out that are in no span stay as they are. */
void attention(const float *q, const float *k, const float *v, size v_stride, const size *spans, size columns,
               float factor, float *probs, float *out, size rows, size heads, size kv_heads, size n, int threads) {
    EACH_ROW
    for (size row = 0; row < rows * heads; row++) {
        const size *span = spans + row / heads * columns;
        size head = row % heads, kv_head = head * kv_heads / heads, a = span[1], b = span[2];
        for (size i = 0; i < a; i++) {
            const float *restrict query = q + ((span[0] + i) * heads + head) * n;
            float *restrict p = probs + span[3] * heads + (head * a + i) * b, most = -INFINITY, sum = 0;
            float *restrict o = out + ((span[0] + i) * heads + head) * n;
            size seen = b - a + i + 1;
            EACH_KEY(span, columns, seen) {
                p[j] = dot(query, k + (key * kv_heads + kv_head) * n, n) * factor;
                most = p[j] > most ? p[j] : most;
            }
            for (size j = 0; j < seen; j++) {
                p[j] = exp_(p[j] - most);
                sum += p[j];
            }
            memset(o, 0, n * sizeof(float));
            EACH_KEY(span, columns, seen) {
                p[j] /= sum;
                add_scaled(o, v + key * v_stride + kv_head * n, p[j], n);
            }
        }
    }
}

/* dq [T, heads, n], dk and dv [S, kv_heads, n], all of zeros before, from the gradient of out */
void attention_backward(const float *grad, const float *q, const float *k, const float *v, size v_stride,
                        const size *spans, size columns, float factor, const float *probs, float *dq, float *dk,
                        float *dv, size rows, size heads, size kv_heads, size n, int threads) {
    size group = heads / kv_heads, most = 1;
    for (size row = 0; row < rows; row++) most = spans[row * columns + 2] > most ? spans[row * columns + 2] : most;
    EACH_ROW /* spans share keys, heads do not */
    for (size kv_head = 0; kv_head < kv_heads; kv_head++) {
        float slope[most];
        for (size row = 0; row < rows; row++)
            for (size head = kv_head * group; head < (kv_head + 1) * group; head++) {
                const size *span = spans + row * columns;
                size a = span[1], b = span[2];
                for (size i = 0; i < a; i++) {
                    size at = ((span[0] + i) * heads + head) * n, seen = b - a + i + 1;
                    const float *restrict g = grad + at, *restrict query = q + at;
                    const float *restrict p = probs + span[3] * heads + (head * a + i) * b;
                    float *restrict d = dq + at, along = 0;
                    EACH_KEY(span, columns, seen) {
                        slope[j] = dot(g, v + key * v_stride + kv_head * n, n);
                        along += p[j] * slope[j];
                    }
                    EACH_KEY(span, columns, seen) {
                        size of_key = (key * kv_heads + kv_head) * n;
                        float s = p[j] * (slope[j] - along) * factor;
                        add_scaled(d, k + of_key, s, n);
                        add_scaled(dk + of_key, query, s, n);
                        add_scaled(dv + of_key, g, p[j], n);
                    }
                }
            }
    }
}

/* What the backward of one layer in `decoder` reads. */
typedef struct {
    float *x, *y, *q, *k, *attended, *middle, *gate_up, *probs, *scale, *middle_scale;
} Kept;

static Kept kept_at(float *x, size rows, size width, size hidden, size heads, size kv_heads, size n, size pairs) {
    Kept s = {x};
    s.y = x + rows * width;
    s.q = s.y + rows * (heads + 2 * kv_heads) * n;
    s.k = s.q + rows * heads * n;
    s.attended = s.k + rows * kv_heads * n;
    s.middle = s.attended + rows * heads * n;
    s.gate_up = s.middle + rows * width;
    s.probs = s.gate_up + rows * 2 * hidden;
    s.scale = s.probs + pairs * heads;
    s.middle_scale = s.scale + rows;
    return s;
}

/* Spans of `attention`, and the sum of their a * b. */
typedef struct {
    const size *rows;
    size number, columns, pairs;
} Spans;

/* All layers and the norm after them: out [rows - start, width] from x [rows, width]. In the last layer queries are the
   rows from `start` on, with spans of their own. Layer i keeps what its backward needs at kept + i * stride, and the last
   one's output follows; with stride 0 there is no backward. work has rows * (width + hidden) numbers. */
void decoder(gemm *multiply, const Layer *layers, size num_layers, const float *norm, const float *x, const float *cos,
             const float *sin, float eps, float factor, const Spans *spans, const Spans *last, float *kept, size stride,
             float *work, float *out, float *scale, size rows, size start, size width, size hidden, size heads,
             size kv_heads, size n, int threads, int most_threads) {
    size all = (heads + 2 * kv_heads) * n, inner = heads * n;
    memcpy(kept, x, rows * width * sizeof(float));
    for (size i = 0; i < num_layers; i++, kept += stride) {
        size first = i + 1 < num_layers ? 0 : start;
        const Spans *seen = i + 1 < num_layers ? spans : last;
        Kept s = kept_at(kept, rows, width, hidden, heads, kv_heads, n, spans->pairs);
        project(multiply, layers + i, s.x, cos, sin, eps, work, s.scale, s.y, s.q, s.k, rows, width, heads, kv_heads, n,
                threads);
        attention(s.q, s.k, s.y + inner + kv_heads * n, all, seen->rows, seen->columns, factor, s.probs,
                  s.attended, seen->number, heads, kv_heads, n, most_threads);
        finish(multiply, layers + i, s.x + first * width, s.attended + first * inner, eps, s.middle, s.middle_scale,
               s.gate_up, kept + stride, work, rows - first, width, inner, hidden, threads);
    }
    rms_norm(kept, norm, eps, out, scale, rows - start, width, threads);
}

/* dx, d_norm and d of each layer from the gradient of out. work has rows * (3 width + 2 (heads + kv_heads) n +
   max((heads + 2 kv_heads) n, 4 hidden)) + threads * max(width, n) numbers. */
void decoder_backward(gemm *multiply, const Layer *layers, const Layer *d, size num_layers, const float *norm,
                      float *d_norm, const float *cos, const float *sin, float eps, float factor, const Spans *spans,
                      const Spans *last, float *kept, size stride, float *work, const float *scale, const float *grad,
                      float *dx, size rows, size start, size width, size hidden, size heads, size kv_heads, size n,
                      int threads, int most_threads) {
    size all = (heads + 2 * kv_heads) * n, inner = heads * n, first = start;
    float *residual = work, *d_attended = residual + rows * width, *dq = d_attended + rows * inner;
    float *dk = dq + rows * inner, *dv = dk + rows * kv_heads * n, *more = dv + rows * kv_heads * n;
    memset(residual, 0, rows * width * sizeof(float));
    rms_norm_backward(grad, kept + num_layers * stride, norm, scale, residual, dx, d_norm, more, more + rows * width,
                      rows - start, width, threads);
    for (size i = num_layers; i-- > 0; first = 0) {
        const Spans *seen = i + 1 < num_layers ? spans : last;
        Kept s = kept_at(kept + i * stride, rows, width, hidden, heads, kv_heads, n, spans->pairs);
        finish_backward(multiply, layers + i, d + i, s.attended + first * inner, s.middle, s.middle_scale, s.gate_up,
                        dx, residual + first * width, d_attended + first * inner, more, rows - first, width, inner,
                        hidden, threads);
        memset(dq, 0, rows * all * sizeof(float));
        attention_backward(d_attended, s.q, s.k, s.y + inner + kv_heads * n, all, seen->rows, seen->columns,
                           factor, s.probs, dq, dk, dv, seen->number, heads, kv_heads, n, most_threads);
        project_backward(multiply, layers + i, d + i, s.x, s.scale, s.y, cos, sin, eps, dq, dk, dv, residual, dx, more,
                         rows, width, heads, kv_heads, n, threads);
    }
}
