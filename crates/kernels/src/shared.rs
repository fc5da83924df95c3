//! Memory that other processes map too: ranks read each other's activations where they lie.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::cpu::LINE;

/// Some bytes of it, and what keeps them mapped.
pub struct SharedMemory {
    start: NonNull<u8>,
    bytes: usize,
    keeper: Arc<dyn Any + Send + Sync>,
}

// SAFETY: who has it alone uses its bytes, in this process.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    /// Begins at a multiple of a cache line.
    ///
    /// # Safety
    /// As long as `keeper` lives, the bytes can be read and written, and nothing else in this process refers to them. Other processes
    /// write to them only while nobody here reads, and read them only while nobody here writes, or can spoil no more than numbers.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        assert!(start.as_ptr().addr().is_multiple_of(LINE), "shared memory begins with a line");
        Self { start, bytes, keeper }
    }

    pub(crate) fn into_parts(self) -> (NonNull<u8>, usize, Arc<dyn Any + Send + Sync>) {
        (self.start, self.bytes, self.keeper)
    }
}
