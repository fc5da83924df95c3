// The kernels of the CUDA backend. NVRTC compiles them at run time for the device, without any header; the host defines
// PAGE_TOKENS. bf16 values are passed as `unsigned short`.
//
// A captured graph fixes only the grid of each launch. Everything that varies from step to step is read from the step's
// device buffer, and rows after the step's last are not written, so a graph captured for n rows serves any step of up to n.
// A row's arithmetic does not depend on any other row, so a row's result is the same in every batch.

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(PAGE_TOKENS == 32, "attend gives each lane of a warp one token of a page");

// Mirror of `step.rs`: header, then tokens, positions and page-table starts of the rows, logit rows, page tables.
struct Step {
    const u32* data;
    __device__ u32 rows() const { return data[0]; }
    __device__ u32 logit_rows() const { return data[1]; }
    __device__ u32 token(u32 row) const { return data[2 + row]; }
    __device__ u32 position(u32 row) const { return data[2 + rows() + row]; }
    __device__ u32 wanted_row(u32 i) const { return data[2 + 3 * rows() + i]; }
    __device__ const u32* page_table(u32 row) const {
        return data + 2 + 3 * rows() + logit_rows() + data[2 + 2 * rows() + row];
    }
};

__device__ float widen(bf16 x) { return __uint_as_float((u32)x << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ bf16 narrow(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

__device__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// The sum over a block of up to 32 warps, returned to every thread.
__device__ float block_sum(float x) {
    __shared__ float parts[32];
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < warps ? parts[lane] : 0.0f);
}

// One block per row. The table holds `held` tokens from token `first` on; a token outside it gives a row of zeros.
extern "C" __global__ void embed(
    const u32* step_data, float* out, const bf16* table, u32 first, u32 held, u32 cols, float scale) {
    Step step{step_data};
    u32 row = blockIdx.x;
    if (row >= step.rows()) return;
    u32 index = step.token(row) - first;  // wraps to beyond `held` for a token before `first`
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x)
        out[(u64)row * cols + i] = index < held ? scale * widen(table[(u64)index * cols + i]) : 0.0f;
}

extern "C" __global__ void gather_wanted(const u32* step_data, float* out, const float* x, u32 cols) {
    Step step{step_data};
    u32 i = blockIdx.x;
    if (i >= step.logit_rows()) return;
    u64 row = step.wanted_row(i);
    for (u32 j = threadIdx.x; j < cols; j += blockDim.x) out[(u64)i * cols + j] = x[row * cols + j];
}

// One block per row.
extern "C" __global__ void rms_norm(bf16* out, const float* x, const float* weight, u32 cols, float eps) {
    x += (u64)blockIdx.x * cols;
    out += (u64)blockIdx.x * cols;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) squares += x[i] * x[i];
    float factor = 1.0f / sqrtf(block_sum(squares) / cols + eps);
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) out[i] = narrow(weight[i] * (x[i] * factor));
}

// One warp per head; blockIdx.x is the row.
extern "C" __global__ void rms_norm_heads(
    float* x, const float* weight, u32 cols, u32 first, u32 heads, u32 dim, float eps) {
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (u32 head = threadIdx.x / 32; head < heads; head += warps) {
        float* values = x + (u64)blockIdx.x * cols + first + head * dim;
        float squares = 0.0f;
        for (u32 i = lane; i < dim; i += 32) squares += values[i] * values[i];
        float factor = 1.0f / sqrtf(warp_sum(squares) / dim + eps);
        for (u32 i = lane; i < dim; i += 32) values[i] = weight[i] * (values[i] * factor);
    }
}

extern "C" __global__ void add_bias(float* x, const float* bias, u32 cols) {
    for (u32 i = threadIdx.x; i < cols; i += blockDim.x) x[(u64)blockIdx.x * cols + i] += bias[i];
}

// One block per row. Pair i of a head is (i, i + half), or (2 i, 2 i + 1) when `pairs`.
extern "C" __global__ void rotate(
    const u32* step_data, float* x, const float2* angles, u32 cols, u32 first, u32 heads, u32 dim, u32 half,
    u32 positions, u32 pairs) {
    Step step{step_data};
    u32 row = blockIdx.x;
    if (row >= step.rows()) return;
    u32 position = step.position(row);
    for (u32 i = threadIdx.x; i < heads * half; i += blockDim.x) {
        u32 pair = i % half;
        float* head = x + (u64)row * cols + first + (i / half) * dim;
        float* a = head + (pairs ? 2 * pair : pair);
        float* b = pairs ? a + 1 : a + half;
        float2 angle = make_float2(not_a_number(), not_a_number());
        if (position < positions) angle = angles[(u64)position * half + pair];
        float x0 = *a, x1 = *b;
        *a = x0 * angle.x - x1 * angle.y;
        *b = x1 * angle.x + x0 * angle.y;
    }
}

// Keys and values are [pages, kv_heads, PAGE_TOKENS, dim]. One block per row.
extern "C" __global__ void write_kv(
    const u32* step_data, bf16* keys, bf16* values, const float* qkv, u32 cols, u32 key_first, u32 value_first,
    u32 kv_heads, u32 dim, u32 pages) {
    Step step{step_data};
    u32 row = blockIdx.x;
    if (row >= step.rows()) return;
    u32 position = step.position(row);
    u32 page = step.page_table(row)[position / PAGE_TOKENS];
    if (page >= pages) return;
    const float* source = qkv + (u64)row * cols;
    for (u32 i = threadIdx.x; i < kv_heads * dim; i += blockDim.x) {
        u64 at = (((u64)page * kv_heads + i / dim) * PAGE_TOKENS + position % PAGE_TOKENS) * dim + i % dim;
        keys[at] = narrow(source[key_first + i]);
        values[at] = narrow(source[value_first + i]);
    }
}

// Attention of one row and up to GROUP query heads of one KV head: blockIdx is (row, KV head, part of the group).
// Each of WARPS warps processes every WARPS-th page with an online softmax. Lanes are tokens for the scores and elements of
// the head (N each) for the weighted sum; the warps' results are combined at the end, in warp order. The order of a row's
// summation depends only on its position. Known limits: every row reads its sequence's pages again, and a single long
// sequence has few blocks.
constexpr u32 GROUP = 4, WARPS = 8;

template <u32 N> struct alignas(2 * N) Elements { bf16 at[N]; };

template <u32 N>
__device__ void attend(
    const u32* step_data, bf16* out, const float* qkv, const bf16* keys, const bf16* values, u32 cols, u32 query_first,
    u32 heads, u32 kv_heads, u32 dim, u32 pages, u32 window, float scale) {
    extern __shared__ float4 shared[];
    Step step{step_data};
    u32 row = blockIdx.x, kv_head = blockIdx.y;
    if (row >= step.rows()) return;
    u32 group = heads / kv_heads;
    u32 first_head = kv_head * group + blockIdx.z * GROUP;
    u32 here = min(GROUP, group - blockIdx.z * GROUP);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    float* query = (float*)shared;               // [GROUP, dim]
    float* partial = query + GROUP * dim;        // [WARPS, GROUP, dim]
    float* best = partial + WARPS * GROUP * dim; // [WARPS, GROUP]
    float* total = best + WARPS * GROUP;         // [WARPS, GROUP]
    for (u32 i = threadIdx.x; i < GROUP * dim; i += blockDim.x)
        query[i] = i < here * dim ? scale * qkv[(u64)row * cols + query_first + first_head * dim + i] : 0.0f;
    __syncthreads();

    u32 position = step.position(row);
    u32 oldest = position + 1 > window ? position + 1 - window : 0;
    const u32* table = step.page_table(row);
    float maximum[GROUP], sum[GROUP], acc[GROUP][N];
    for (u32 h = 0; h < GROUP; h++) {
        maximum[h] = -infinity();
        sum[h] = 0.0f;
        for (u32 j = 0; j < N; j++) acc[h][j] = 0.0f;
    }

    for (u32 slot = oldest / PAGE_TOKENS + warp; slot <= position / PAGE_TOKENS; slot += WARPS) {
        if (table[slot] >= pages) continue;
        u64 base = ((u64)table[slot] * kv_heads + kv_head) * PAGE_TOKENS * dim;
        u32 begin = max(oldest, slot * PAGE_TOKENS) - slot * PAGE_TOKENS;
        u32 end = min(position - slot * PAGE_TOKENS, PAGE_TOKENS - 1) + 1;

        float score[GROUP] = {};
        const uint4* key = (const uint4*)(keys + base + lane * dim);
        for (u32 i = 0; i < dim / 8; i++) {
            uint4 raw = key[i];
            u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
            for (u32 h = 0; h < GROUP; h++) {
                const float* q = query + h * dim + 8 * i;
                for (u32 w = 0; w < 4; w++) {
                    score[h] += q[2 * w] * __uint_as_float(words[w] << 16);
                    score[h] += q[2 * w + 1] * __uint_as_float(words[w] & 0xffff0000u);
                }
            }
        }
        float weight[GROUP];
        for (u32 h = 0; h < GROUP; h++) {
            float s = lane >= begin && lane < end ? score[h] : -infinity();
            float raised = fmaxf(maximum[h], warp_max(s));
            float keep = expf(maximum[h] - raised);
            weight[h] = expf(s - raised);
            sum[h] = sum[h] * keep + warp_sum(weight[h]);
            maximum[h] = raised;
            for (u32 j = 0; j < N; j++) acc[h][j] *= keep;
        }
        // Slots after the position may be unwritten, and 0 * NaN is NaN, so the loop covers only the visible tokens.
        u32 element = min(lane * N, dim - N);
        #pragma unroll 4
        for (u32 t = begin; t < end; t++) {
            Elements<N> value = *(const Elements<N>*)(values + base + t * dim + element);
            for (u32 h = 0; h < GROUP; h++) {
                float w = __shfl_sync(~0u, weight[h], t);
                for (u32 j = 0; j < N; j++) acc[h][j] += w * widen(value.at[j]);
            }
        }
    }

    for (u32 h = 0; h < GROUP; h++) {
        if (lane == 0) {
            best[warp * GROUP + h] = maximum[h];
            total[warp * GROUP + h] = sum[h];
        }
        for (u32 j = 0; j < N && lane * N < dim; j++) partial[(warp * GROUP + h) * dim + lane * N + j] = acc[h][j];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < here * dim; i += blockDim.x) {
        u32 h = i / dim;
        float top = -infinity(), all = 0.0f, value = 0.0f;
        for (u32 w = 0; w < WARPS; w++) top = fmaxf(top, best[w * GROUP + h]);
        for (u32 w = 0; w < WARPS; w++) {
            float factor = expf(best[w * GROUP + h] - top);
            all += factor * total[w * GROUP + h];
            value += factor * partial[(w * GROUP + h) * dim + i % dim];
        }
        out[((u64)row * heads + first_head) * dim + i] = narrow(value / all);
    }
}

#define ATTEND(N)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_##N(                                               \
        const u32* step_data, bf16* out, const float* qkv, const bf16* keys, const bf16* values, u32 cols,             \
        u32 query_first, u32 heads, u32 kv_heads, u32 dim, u32 pages, u32 window, float scale) {                       \
        attend<N>(step_data, out, qkv, keys, values, cols, query_first, heads, kv_heads, dim, pages, window, scale);   \
    }
ATTEND(1)
ATTEND(2)
ATTEND(4)
ATTEND(8)

__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// `inner` is the number of columns of `out`, half that of `x`; one thread per element.
extern "C" __global__ void gate(bf16* out, const float* x, u32 rows, u32 inner, u32 gelu) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (u64)rows * inner) return;
    const float* pair = x + i / inner * 2 * inner + i % inner;
    float a = pair[0];
    out[i] = narrow((gelu ? gelu_tanh(a) : silu(a)) * pair[inner]);
}

extern "C" __global__ void add(float* x, const float* y, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += y[i];
}

extern "C" __global__ void add_narrow(float* x, const bf16* y, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += widen(y[i]);
}
