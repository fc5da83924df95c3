//! GEMM through cuBLASLt: bf16 weights and activations, f32 sums and results.
//!
//! The descriptors and the chosen algorithm of a shape are created on its first use and cached, so later products of that
//! shape allocate nothing and can be captured.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, result::CublasError, sys};

use super::device::{Device, Memory, fault};
use crate::BackendError;

/// The size that NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Products of up to this many rows use the algorithm that is chosen for this many, so that a row is summed in the same
/// order in every decode step: algorithms chosen for each number of rows would split the sums differently. Steps of few rows
/// are a little slower for it. Above this, the algorithm still depends on the number of rows; forbidding split sums would
/// make all agree, but decode much slower.
const PLANNED_ROWS: usize = 64;

/// `CUBLAS_OP_T`, which cudarc names only in its bindings of the older cuBLAS.
const TRANSPOSE: i32 = 1;

pub struct Gemm {
    handle: sys::cublasLtHandle_t,
    workspace: Memory,
    plans: Mutex<HashMap<Shape, Plan>>,
}

// SAFETY: cuBLASLt handles may be used from any thread; plans are used only under their lock.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

/// `[rows, inner] x [outer, inner]^T -> [rows, outer]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub rows: usize,
    pub inner: usize,
    pub outer: usize,
}

impl Gemm {
    pub fn new(device: &Device) -> Result<Self, BackendError> {
        device.bind()?;
        let workspace = device.allocate("matrix product workspace", WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(|error| fault("open cuBLASLt", error))?;
        Ok(Self { handle, workspace, plans: Mutex::default() })
    }

    /// Queues `out = x weight^T`.
    pub fn multiply(&self, device: &Device, shape: Shape, out: &Memory, x: &Memory, weight: &Memory) {
        let Shape { rows, inner, outer } = shape;
        assert!(out.bytes() >= 4 * rows * outer && x.bytes() >= 2 * rows * inner);
        assert!(weight.bytes() >= 2 * outer * inner);
        device.hold([out, x, weight, &self.workspace].into_iter());
        device.note("use CUDA device", device.stream.context().bind_to_thread());
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = match plans.get(&shape) {
            Some(plan) => self.run(device, plan, out, x, weight),
            None => Plan::new(self.handle, shape).and_then(|plan| {
                let outcome = self.run(device, &plan, out, x, weight);
                plans.insert(shape, plan);
                outcome
            }),
        };
        device.note("multiply matrices", outcome);
    }

    fn run(&self, device: &Device, plan: &Plan, out: &Memory, x: &Memory, weight: &Memory) -> Result<(), CublasError> {
        let (one, zero) = (1f32, 0f32);
        let pointer = |memory: &Memory| memory.address() as *mut std::ffi::c_void;
        // SAFETY: the plan's layouts describe memory whose size `multiply` has checked; the scalars are f32, as in the plan's
        // descriptor, and are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                plan.product.0,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                pointer(weight),
                plan.weight.0,
                pointer(x),
                plan.x.0,
                pointer(out),
                plan.out.0,
                pointer(out),
                plan.out.0,
                &plan.algorithm,
                pointer(&self.workspace),
                self.workspace.bytes(),
                device.stream.cu_stream().cast(),
            )
        }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: created in `new`, not used elsewhere any more, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The cuBLASLt descriptors and algorithm of one shape. In its column-major terms: `out = weight^T x`, with `weight`
/// `[inner, outer]` and `x` `[inner, rows]`.
struct Plan {
    product: Product,
    weight: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, Shape { rows, inner, outer }: Shape) -> Result<Self, CublasError> {
        let product = Product::new()?;
        let weight = Layout::new(sys::cudaDataType::CUDA_R_16BF, inner, outer)?;
        let x = Layout::new(sys::cudaDataType::CUDA_R_16BF, inner, rows)?;
        let out = Layout::new(sys::cudaDataType::CUDA_R_32F, outer, rows)?;
        let preference = Preference::new()?;
        let planned = rows.max(PLANNED_ROWS);
        let planned_x = Layout::new(sys::cudaDataType::CUDA_R_16BF, inner, planned)?;
        let planned_out = Layout::new(sys::cudaDataType::CUDA_R_32F, outer, planned)?;
        // SAFETY: all of these were just created and live until the end of this function.
        let found = unsafe {
            let (x, out) = (planned_x.0, planned_out.0);
            result::get_matmul_algo_heuristic(handle, product.0, weight.0, x, out, out, preference.0)
        }?;
        Ok(Self { product, weight, x, out, algorithm: found.algo })
    }
}

struct Product(sys::cublasLtMatmulDesc_t);

impl Product {
    fn new() -> Result<Self, CublasError> {
        let kind = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = Self(result::create_matmul_desc(kind, sys::cudaDataType::CUDA_R_32F)?);
        let transpose = TRANSPOSE;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the attribute is of this type, and its value is copied.
        unsafe {
            result::set_matmul_desc_attribute(
                product.0,
                attribute,
                (&raw const transpose).cast(),
                size_of_val(&transpose),
            )
        }?;
        Ok(product)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: sys::cudaDataType, rows: usize, cols: usize) -> Result<Self, CublasError> {
        result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, CublasError> {
        let preference = Self(result::create_matmul_pref()?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES;
        // SAFETY: the attribute is a `size_t`, and its value is copied.
        unsafe {
            result::set_matmul_pref_attribute(preference.0, attribute, (&raw const bytes).cast(), size_of_val(&bytes))
        }?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
