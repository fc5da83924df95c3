//! CUDA graphs: captures the ops of a step once and replays them with one launch.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use cudarc::driver::{CudaGraph, sys};

use super::CudaBackend;
use super::device::{Memory, fault};
use crate::BackendError;

/// Captured ops. Keeps the memory that they use alive.
pub struct Graph {
    graph: CudaGraph,
    _held: Vec<Memory>,
}

// SAFETY: a CUDA graph may move between threads, and `replay` takes it by `&mut`, so no two threads use it at once.
unsafe impl Send for Graph {}

impl CudaBackend {
    /// Captures the ops that `ops` calls, without running them.
    ///
    /// The same ops must have run once before, so that matrix products of these shapes have their plans. A graph is valid
    /// for the step, the buffers and the numbers of rows that it was captured with; a later [`begin`] of the same step
    /// changes all other inputs. The step may then have fewer rows or logit rows, but not more; rows after its last one
    /// are undefined.
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

    /// Queues the captured ops.
    pub fn replay(&self, graph: &mut Graph) {
        self.device.note("replay graph", graph.graph.launch());
    }
}
