//! The CUDA device: one context, one stream, the compiled kernels, and the first error.
//!
//! All work is queued on one stream, so ops run in order without events between them, and a whole step can be captured. Ops
//! do not return errors: the first error is stored here and returned by every later call that returns a `Result`, which is
//! also how CUDA behaves after a sticky error.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result,
    sys::{self, CUdeviceptr},
};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use crate::{BackendError, PAGE_TOKENS};

const SOURCE: &str = include_str!("kernels.cu");

/// A piece of device memory. Clones share it; a captured graph holds clones to keep the memory that it uses alive.
#[derive(Clone)]
pub struct Memory {
    slice: Arc<CudaSlice<u8>>,
    address: CUdeviceptr,
}

impl Memory {
    pub fn bytes(&self) -> usize {
        self.slice.len()
    }

    pub fn address(&self) -> CUdeviceptr {
        self.address
    }
}

/// An argument of a kernel, as `kernels.cu` declares it: a pointer, `u32` or `float`.
pub enum Arg<'a> {
    Memory(&'a Memory),
    /// The memory from this byte offset on.
    From(&'a Memory, usize),
    Count(usize),
    Real(f32),
}

/// The most arguments that a kernel takes.
const ARGS_MAX: usize = 16;

pub struct Kernels {
    pub embed: CudaFunction,
    pub gather_logit_rows: CudaFunction,
    pub rms_norm: CudaFunction,
    pub rms_norm_heads: CudaFunction,
    pub add_bias: CudaFunction,
    pub rotate: CudaFunction,
    pub write_kv: CudaFunction,
    /// Indexed by the elements of a head per lane of a warp: 1, 2, 4, 8.
    pub attend: [CudaFunction; 4],
    pub gate: CudaFunction,
    pub add: CudaFunction,
    pub add_narrow: CudaFunction,
}

pub struct Device {
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
    fault: OnceLock<String>,
    /// While a graph is captured: the memory that it uses.
    held: Mutex<Option<Vec<Memory>>>,
}

impl Device {
    pub fn open(ordinal: usize) -> Result<Self, BackendError> {
        check_libraries()?;
        let context = CudaContext::new(ordinal).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => BackendError::NoDevice("the driver finds none"),
            _ => fault("open CUDA device", error),
        })?;
        // SAFETY: this backend queues all work on the one stream created below, so no slice is ever used on two streams.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|error| fault("make CUDA stream", error))?;
        let kernels = Kernels::load(&compile(&context)?).map_err(|error| fault("load CUDA kernels", error))?;
        Ok(Self { stream, kernels, fault: OnceLock::new(), held: Mutex::new(None) })
    }

    /// Zeroed device memory; at least one byte, so that every `Memory` has an address.
    pub fn allocate(&self, what: &'static str, bytes: usize) -> Result<Memory, BackendError> {
        let slice = self.stream.alloc_zeros(bytes.max(1)).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::OutOfMemory { what, bytes },
            _ => fault("allocate CUDA memory", error),
        })?;
        let (address, _) = slice.device_ptr(&self.stream);
        Ok(Memory { address, slice: Arc::new(slice) })
    }

    /// Copies `values` to `memory` from element `from` on. `values` may be reused when this returns.
    pub fn upload<T: DeviceRepr>(&self, memory: &Memory, from: usize, values: &[T]) -> Result<(), BackendError> {
        assert!((from + values.len()) * size_of::<T>() <= memory.bytes());
        self.bind()?;
        let to = memory.address + (from * size_of::<T>()) as u64;
        // SAFETY: the destination has space for `values`, and CUDA copies pageable memory before the call returns.
        unsafe { result::memcpy_htod_async(to, values, self.stream.cu_stream()) }
            .map_err(|error| fault("copy to CUDA device", error))
    }

    /// Waits for all work queued before, then copies from element `from` of `memory` on.
    pub fn download<T: DeviceRepr>(&self, memory: &Memory, from: usize, out: &mut [T]) -> Result<(), BackendError> {
        assert!((from + out.len()) * size_of::<T>() <= memory.bytes());
        self.bind()?;
        let source = memory.address + (from * size_of::<T>()) as u64;
        // SAFETY: the source holds that many elements from `from` on, and `out` stays borrowed until the stream is
        // synchronised.
        unsafe { result::memcpy_dtoh_async(out, source, self.stream.cu_stream()) }
            .and_then(|()| self.stream.synchronize())
            .map_err(|error| fault("copy from CUDA device", error))?;
        self.healthy()
    }

    /// Queues a kernel. An empty grid is a no-op.
    ///
    /// `args` must match the kernel's parameters in order and kind, and each memory must be as large as the kernel expects.
    pub fn launch(&self, kernel: &CudaFunction, grid: [usize; 3], threads: usize, shared: usize, args: &[Arg<'_>]) {
        if grid.contains(&0) {
            return;
        }
        assert!(args.len() <= ARGS_MAX);
        let mut values = [0u64; ARGS_MAX];
        for (value, arg) in values.iter_mut().zip(args) {
            *value = match *arg {
                Arg::Memory(memory) => memory.address,
                Arg::From(memory, byte) => memory.address + byte as u64,
                Arg::Count(count) => u64::from(small(count)),
                Arg::Real(real) => u64::from(real.to_bits()),
            };
        }
        self.hold(args.iter().filter_map(|arg| match arg {
            Arg::Memory(memory) | Arg::From(memory, _) => Some(*memory),
            Arg::Count(_) | Arg::Real(_) => None,
        }));
        let mut pointers: [*mut c_void; ARGS_MAX] = std::array::from_fn(|i| (&raw mut values[i]).cast());
        let launched = self.stream.context().bind_to_thread().and_then(|()| {
            // SAFETY: each pointer refers to eight bytes whose low bytes are the value in the width that the kernel declares
            // (CUDA hosts are little-endian); the callers in this module pass what `kernels.cu` expects, with shapes that
            // they have checked against the memories' sizes.
            unsafe {
                result::launch_kernel(
                    kernel.cu_function(),
                    (small(grid[0]), small(grid[1]), small(grid[2])),
                    (small(threads), 1, 1),
                    small(shared),
                    self.stream.cu_stream(),
                    &mut pointers[..args.len()],
                )
            }
        });
        self.note("launch CUDA kernel", launched);
    }

    /// Stores the first error of an op, for the next call that can return it.
    pub fn note<E: std::fmt::Debug>(&self, what: &str, outcome: Result<(), E>) {
        if let Err(error) = outcome {
            self.fault.get_or_init(|| format!("{what}: {error:?}"));
        }
    }

    pub fn healthy(&self) -> Result<(), BackendError> {
        match self.fault.get() {
            Some(fault) => Err(BackendError::Device(fault.clone())),
            None => Ok(()),
        }
    }

    /// Makes the context current on the calling thread, because any thread may use a backend.
    pub fn bind(&self) -> Result<(), BackendError> {
        self.stream.context().bind_to_thread().map_err(|error| fault("use CUDA device", error))
    }

    /// During a capture, keeps these memories alive for the graph.
    pub fn hold<'a>(&self, memories: impl Iterator<Item = &'a Memory>) {
        if let Some(held) = self.held().as_mut() {
            held.extend(memories.cloned());
        }
    }

    pub fn held(&self) -> MutexGuard<'_, Option<Vec<Memory>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn fault(what: &str, error: impl std::fmt::Debug) -> BackendError {
    BackendError::Device(format!("{what}: {error:?}"))
}

impl Kernels {
    fn load(module: &Arc<CudaModule>) -> Result<Self, DriverError> {
        let load = |name| module.load_function(name);
        Ok(Self {
            embed: load("embed")?,
            gather_logit_rows: load("gather_logit_rows")?,
            rms_norm: load("rms_norm")?,
            rms_norm_heads: load("rms_norm_heads")?,
            add_bias: load("add_bias")?,
            rotate: load("rotate")?,
            write_kv: load("write_kv")?,
            attend: [load("attend_1")?, load("attend_2")?, load("attend_4")?, load("attend_8")?],
            gate: load("gate")?,
            add: load("add")?,
            add_narrow: load("add_narrow")?,
        })
    }
}

/// cudarc panics if a library is missing; this check returns an error instead.
fn check_libraries() -> Result<(), BackendError> {
    // SAFETY: loading NVIDIA's libraries runs their initialisers, which have no preconditions.
    let (driver, nvrtc, cublaslt) = unsafe {
        use cudarc::{cublaslt, driver, nvrtc};
        (driver::sys::is_culib_present(), nvrtc::sys::is_culib_present(), cublaslt::sys::is_culib_present())
    };
    if !driver {
        return Err(BackendError::NoDevice("libcuda, which comes with the driver, is not on the library path"));
    }
    for (name, present) in [("libnvrtc", nvrtc), ("libcublasLt", cublaslt)] {
        if !present {
            return Err(BackendError::Device(format!("{name} is not on this machine's library path")));
        }
    }
    Ok(())
}

fn compile(context: &Arc<CudaContext>) -> Result<Arc<CudaModule>, BackendError> {
    let (major, minor) = context.compute_capability().map_err(|error| fault("read compute capability", error))?;
    let options = [
        format!("--gpu-architecture=compute_{major}{minor}"),
        format!("--define-macro=PAGE_TOKENS={PAGE_TOKENS}"),
        "--std=c++17".into(),
    ];
    let options = CompileOptions { options: options.into(), name: Some("kernels.cu".into()), ..Default::default() };
    let ptx = compile_ptx_with_opts(SOURCE, options).map_err(|error| match error {
        CompileError::CompileError { log, .. } => fault("compile CUDA kernels", log),
        other => fault("compile CUDA kernels", other),
    })?;
    context.load_module(ptx).map_err(|error| fault("load CUDA kernels", error))
}

/// Sizes of a step fit in 32 bits: its limits were checked when its buffers were allocated.
fn small(count: usize) -> u32 {
    u32::try_from(count).expect("counts of a step fit in 32 bits")
}
