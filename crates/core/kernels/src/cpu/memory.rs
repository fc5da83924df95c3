//! Zeroed memory at cache-line alignment. Large allocations come directly from the operating system and become resident
//! only where they are touched, so a buffer for the largest step costs nothing until a step of that size runs.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::BackendError;

/// Number types for which all-zero bits are a valid value and which need no drop.
pub(crate) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for i32 {}
impl Plain for i16 {}
impl Plain for i8 {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u64 {}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;
/// Blocks from this size on may be backed by huge pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Working memory from this size on is backed by huge pages.
const LARGE: usize = 1 << 20;

/// A fixed-length slice of numbers, zeroed at first and aligned to cache lines.
pub(crate) struct Aligned<T: Plain> {
    start: NonNull<T>,
    len: usize,
    _allocation: Allocation,
}

/// The underlying allocation. It is larger than needed, because the allocator returns zeroed memory without touching it only
/// at its default alignment.
struct Allocation {
    block: *mut u8,
    layout: Layout,
}

// SAFETY: it owns plain numbers, like a `Box<[T]>`.
unsafe impl<T: Plain> Send for Aligned<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Plain> Sync for Aligned<T> {}

impl<T: Plain> Aligned<T> {
    pub(crate) fn zeroed(what: &'static str, len: usize) -> Result<Self, BackendError> {
        Self::allocate(what, len, LINE)
    }

    /// The same, backed by huge pages if the operating system supports them: for memory that is read or written as a whole.
    /// It becomes resident in units of huge pages.
    pub(crate) fn huge(what: &'static str, len: usize) -> Result<Self, BackendError> {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes < HUGE_PAGE {
            return Self::zeroed(what, len);
        }
        let aligned = Self::allocate(what, len, HUGE_PAGE)?;
        #[cfg(target_os = "linux")]
        // SAFETY: advice about pages that lie within the block; it changes no contents, and a refusal does no harm.
        unsafe {
            libc::madvise(aligned.start.as_ptr().cast(), bytes / HUGE_PAGE * HUGE_PAGE, libc::MADV_HUGEPAGE);
        }
        Ok(aligned)
    }

    fn allocate(what: &'static str, len: usize, align: usize) -> Result<Self, BackendError> {
        let too_large = || BackendError::OutOfMemory { what, bytes: len.saturating_mul(size_of::<T>()) };
        let layout = layout::<T>(len, align).ok_or_else(too_large)?;
        // SAFETY: the layout's size is not zero.
        let block = unsafe { alloc_zeroed(layout) };
        if block.is_null() {
            return Err(too_large());
        }
        // SAFETY: the block is `align` bytes longer than `len` numbers, so the aligned start and all numbers lie within it.
        let start = unsafe { block.add(block.align_offset(align)) };
        Ok(Self {
            start: NonNull::new(start.cast()).expect("inside a block"),
            len,
            _allocation: Allocation { block, layout },
        })
    }

    /// Pointer to the first element. Owners of parts of a shared block write through it.
    pub(crate) fn start(&self) -> NonNull<T> {
        self.start
    }
}

impl<T: Plain> Aligned<T> {
    /// Working memory of a step, backed by huge pages only if it is large.
    pub(crate) fn working(what: &'static str, len: usize) -> Result<Self, BackendError> {
        if len.saturating_mul(size_of::<T>()) < LARGE { Self::zeroed(what, len) } else { Self::huge(what, len) }
    }
}

fn layout<T>(len: usize, align: usize) -> Option<Layout> {
    let bytes = len.checked_mul(size_of::<T>())?.checked_add(align)?;
    Layout::from_size_align(bytes, align_of::<T>()).ok()
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `Aligned::allocate` with this layout.
        unsafe { dealloc(self.block, self.layout) };
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` points to `len` initialised numbers that this value owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Returns memory that the allocator keeps for later to the system. It may take milliseconds.
pub fn trim_allocator() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer, and the allocator locks what it changes.
    unsafe {
        libc::malloc_trim(0);
    }
}
