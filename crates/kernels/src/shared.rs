//! Memory that other processes map too: ranks read each other's activations where they lie.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// What such memory begins at a multiple of.
pub const SHARED_ALIGN: usize = 64;

/// Some bytes of it, and what keeps them mapped.
pub struct SharedMemory {
    start: NonNull<u8>,
    bytes: usize,
    keeper: Arc<dyn Any + Send + Sync>,
}

// SAFETY: who has it alone uses its bytes, in this process.
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    /// # Safety
    /// As long as `keeper` lives, the bytes can be read and written, and nothing else in this process refers to them. Other processes
    /// write to them only while nobody here reads, and read them only while nobody here writes, or can spoil no more than numbers.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize, keeper: Arc<dyn Any + Send + Sync>) -> Self {
        assert!(start.as_ptr().addr().is_multiple_of(SHARED_ALIGN), "shared memory begins with a line");
        Self { start, bytes, keeper }
    }

    /// The first `bytes`, if there are as many, and the rest: from the next line on.
    pub(crate) fn take(self, bytes: usize) -> Option<(Self, Self)> {
        let end = bytes.checked_next_multiple_of(SHARED_ALIGN).filter(|&end| end <= self.bytes)?;
        let Self { start, keeper, .. } = self;
        // SAFETY: the end lies within the bytes, or right after them.
        let after = unsafe { start.add(end) };
        Some((Self { start, bytes, keeper: keeper.clone() }, Self { start: after, bytes: self.bytes - end, keeper }))
    }

    pub(crate) fn into_parts(self) -> (NonNull<u8>, usize, Arc<dyn Any + Send + Sync>) {
        (self.start, self.bytes, self.keeper)
    }
}
