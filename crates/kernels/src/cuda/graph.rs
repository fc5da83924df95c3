//! A step's ops, recorded once and queued again as one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use cudarc::driver::{CudaGraph, sys};

use super::CudaBackend;
use super::device::{Memory, fault};
use crate::BackendError;

/// Recorded ops, with the memory that they read and write kept alive.
pub struct Graph {
    graph: CudaGraph,
    _held: Vec<Memory>,
}

// SAFETY: a CUDA graph may move between threads, and `replay` takes it by `&mut`, so no two use it at once.
unsafe impl Send for Graph {}

impl CudaBackend {
    /// Records the ops that `ops` calls, without running them.
    ///
    /// The same ops must have run once before, so that matrix products of these shapes have their plans. A recording
    /// holds for the step, the buffers and the numbers of rows that it was made with; a later [`begin`] of the same step
    /// changes everything else. That step may have fewer rows or logit rows, not more: the rows past its own hold nothing
    /// of meaning.
    ///
    /// [`begin`]: crate::Backend::begin
    pub fn capture(&self, ops: impl FnOnce()) -> Result<Graph, BackendError> {
        let stream = &self.device.stream;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(|error| fault("begin capture", error))?;
        *self.device.held() = Some(Vec::new());
        let outcome = catch_unwind(AssertUnwindSafe(ops));
        let held = self.device.held().take().expect("set above, taken only here");
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        self.device.healthy()?;
        match graph.map_err(|error| fault("end capture", error))? {
            Some(graph) => Ok(Graph { graph, _held: held }),
            None => Err(BackendError::Device("nothing was captured".into())),
        }
    }

    /// Queues the recorded ops.
    pub fn replay(&self, graph: &mut Graph) {
        self.device.note("replay graph", graph.graph.launch());
    }
}
