//! The allocator for packed weights. It places tensors one after the other in large blocks backed by huge pages, because
//! weights on small pages are read more slowly. A single tensor seldom fills a whole number of huge pages.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::memory::{Aligned, HUGE_PAGE, LINE};
use crate::BackendError;

/// Bytes of a block; a larger tensor has a larger block. Only bytes that have been written are resident.
const BLOCK: usize = 256 << 20;
/// Tensors below this size are allocated separately, so that a small model does not make whole huge pages resident.
const SMALL: usize = 160 << 10;

/// Allocates pieces of blocks. A block is freed with its last piece.
#[derive(Default)]
pub(crate) struct Arena {
    open: Mutex<Open>,
}

/// The block from which the next piece is allocated, and how many of its bytes are in use.
#[derive(Default)]
struct Open {
    block: Weak<Aligned<u8>>,
    taken: usize,
}

impl Arena {
    pub(crate) fn zeroed(&self, what: &'static str, len: usize) -> Result<Allocation, BackendError> {
        if len < SMALL {
            return Ok(Allocation::new(Block::Own(Aligned::zeroed(what, len)?), 0, len));
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let aligned = len.checked_next_multiple_of(LINE).ok_or(BackendError::OutOfMemory { what, bytes: len })?;
        let present = open.block.upgrade().map(|block| (block, open.taken));
        if let Some((block, taken)) = &present
            && block.len() - taken >= aligned
        {
            open.taken += aligned;
            return Ok(Allocation::new(Block::Shared(block.clone()), *taken, len));
        }
        let size = aligned.max(BLOCK);
        let block = Aligned::huge(what, size.checked_next_multiple_of(HUGE_PAGE).unwrap_or(size));
        // If the address space is limited, allocate only what this tensor needs.
        let block = Arc::new(block.or_else(|_| Aligned::huge(what, aligned))?);
        // The next piece is allocated from the block with more free bytes.
        let left = present.map_or(0, |(block, taken)| block.len() - taken);
        if block.len() - aligned >= left {
            *open = Open { block: Arc::downgrade(&block), taken: aligned };
        }
        Ok(Allocation::new(Block::Shared(block), 0, len))
    }
}

/// A range of bytes of a block, owned exclusively.
pub(crate) struct Allocation {
    start: NonNull<u8>,
    len: usize,
    _block: Block,
}

/// The allocation that contains a piece.
enum Block {
    Own(Aligned<u8>),
    Shared(Arc<Aligned<u8>>),
}

impl Deref for Block {
    type Target = Aligned<u8>;

    fn deref(&self) -> &Aligned<u8> {
        match self {
            Self::Own(block) => block,
            Self::Shared(block) => block,
        }
    }
}

// SAFETY: it owns its bytes, like a `Box<[u8]>`.
unsafe impl Send for Allocation {}
// SAFETY: shared access only reads.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn new(block: Block, at: usize, len: usize) -> Self {
        assert!(at + len <= block.len());
        // SAFETY: within the block, as was just checked.
        let start = unsafe { block.start().add(at) };
        Self { start, len, _block: block }
    }
}

impl Deref for Allocation {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised bytes that only this value refers to: the arena gives each byte of a block to one piece.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Allocation {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(piece: &Allocation) -> Option<&Arc<Aligned<u8>>> {
        match &piece._block {
            Block::Own(_) => None,
            Block::Shared(block) => Some(block),
        }
    }

    #[test]
    fn pieces_share_blocks_and_nothing_else() {
        let arena = Arena::default();
        let lens = [100, HUGE_PAGE + 1, 0, SMALL, SMALL + 100, HUGE_PAGE];
        let mut pieces: Vec<Allocation> = lens.iter().map(|&len| arena.zeroed("test", len).unwrap()).collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.len(), lens[i]);
            assert!(piece.as_ptr().addr().is_multiple_of(LINE));
            assert!(piece.iter().all(|&byte| byte == 0));
            piece.fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|&byte| byte == i as u8 + 1), "piece {i}");
        }
        let blocks: Vec<_> = pieces.iter().filter_map(shared).collect();
        assert_eq!(blocks.len(), 4);
        assert!(blocks.iter().all(|block| Arc::ptr_eq(block, blocks[0])));
    }

    #[test]
    fn a_tensor_larger_than_a_block_leaves_the_open_one_open() {
        let arena = Arena::default();
        let [first, large, second] = [SMALL, BLOCK + 1, SMALL].map(|len| arena.zeroed("test", len).unwrap());
        assert_eq!(large.len(), BLOCK + 1);
        assert_eq!(large[BLOCK], 0);
        let [first, large, second] = [&first, &large, &second].map(|piece| shared(piece).unwrap());
        assert!(Arc::ptr_eq(first, second) && !Arc::ptr_eq(first, large));
    }

    #[test]
    fn a_block_goes_with_its_last_piece() {
        let arena = Arena::default();
        let [first, second] = [SMALL; 2].map(|len| arena.zeroed("test", len).unwrap());
        let block = Arc::downgrade(shared(&first).unwrap());
        drop(first);
        assert!(block.upgrade().is_some());
        drop(second);
        assert!(block.upgrade().is_none());
        assert_eq!(arena.zeroed("test", SMALL).unwrap().len(), SMALL);
    }
}
