//! `Mapping`: a segment in this process's memory: words, a futex and slots of numbers, at offsets that the limits alone
//! determine. All `unsafe` of the shared memory is here.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::thread::futex;
use types::{Rank, WorldSize};

use super::barrier::{SharedState, Word, atomics};

/// Words that different ranks write are on different lines, and so are slots. Two cache lines, because CPUs prefetch
/// pairs.
const LINE_BYTES: usize = 128;

/// The first line identifies the segment and never changes. Then come one line for the state, one for the futex, and
/// one per rank.
const STATE_LINE: usize = 1;
const FUTEX_LINE: usize = 2;
const RANK_LINES: usize = 3;

const SPINS: u32 = 2_000;
/// Turns after which a wait parks: tens of milliseconds. Until then it yields, because the rank that it waits for may
/// need this core. Parking within a step is expensive: with two ranks on a virtual machine of two cores it halved the
/// speed of prefill.
const TURNS: u32 = 100_000;
/// A parked rank checks again after this time even if nothing wakes it: a peer may have corrupted the futex.
const PARK_MAX: Duration = Duration::from_millis(20);
atomics!(AtomicU64: u64, AtomicU32: u32);

/// The offsets of everything in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub world: WorldSize,
    pub elements_max: usize,
    slot_bytes: usize,
    pub bytes: usize,
}

impl Layout {
    /// `None` if the size overflows.
    pub fn new(world: WorldSize, elements_max: usize) -> Option<Self> {
        let slot_bytes = elements_max.checked_mul(size_of::<f32>())?.checked_next_multiple_of(LINE_BYTES)?;
        let slots = slot_bytes.checked_mul(2 * world.get())?;
        let bytes = Self::slots_offset(world).checked_add(slots)?;
        Some(Self { world, elements_max, slot_bytes, bytes })
    }

    fn slots_offset(world: WorldSize) -> usize {
        (RANK_LINES + world.get()) * LINE_BYTES
    }

    fn word_offset(&self, word: Word) -> usize {
        let (line, index) = match word {
            Word::State => (STATE_LINE, 0),
            Word::Arrived(rank) => (RANK_LINES + rank.index(), 0),
            Word::Asleep(rank) => (RANK_LINES + rank.index(), 1),
            Word::ShmOp(rank, parity) => (RANK_LINES + rank.index(), 2 + parity),
        };
        line * LINE_BYTES + index * size_of::<u64>()
    }

    /// The offset of one of the two slots of a rank.
    fn slot_offset(&self, rank: Rank, parity: usize) -> usize {
        assert!(rank.world() == self.world && parity < 2, "slot {parity} of {rank}");
        Self::slots_offset(self.world) + (parity * self.world.get() + rank.index()) * self.slot_bytes
    }
}

#[derive(Debug)]
pub(super) struct Mapping {
    layout: Layout,
    memory: Memory,
}

impl Mapping {
    /// Maps `fd`. The caller has checked that it has the layout's size and is sealed: otherwise an access could raise
    /// SIGBUS.
    pub fn new(fd: &OwnedFd, layout: Layout) -> io::Result<Self> {
        Ok(Self { layout, memory: Memory::map(fd, layout.bytes)? })
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The words of the first line.
    pub fn title(&self, place: usize) -> &AtomicU64 {
        assert!(place < LINE_BYTES / size_of::<u64>());
        self.atomic(place * size_of::<u64>())
    }

    /// Copies `values` into a slot, from its element `first` on.
    pub fn put(&self, rank: Rank, parity: usize, first: usize, values: &[f32]) {
        let slot = self.slot(rank, parity, first, values.len());
        // SAFETY: `slot` has checked that the elements are within the mapping, and no reference points into a slot.
        // Ranks that follow the barrier do not access them now. One that does not can only corrupt numbers: every bit
        // pattern is an `f32`.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), slot, values.len()) };
    }

    /// Copies a slot's elements from `first` on into `values`.
    pub fn get(&self, rank: Rank, parity: usize, first: usize, values: &mut [f32]) {
        let slot = self.slot(rank, parity, first, values.len());
        // SAFETY: as in `put`.
        unsafe { std::ptr::copy_nonoverlapping(slot.cast_const(), values.as_mut_ptr(), values.len()) };
    }

    /// Adds a slot's elements from `first` on to `values`.
    pub fn add(&self, rank: Rank, parity: usize, first: usize, values: &mut [f32]) {
        let slot = self.slot(rank, parity, first, values.len()).cast_const();
        for (i, value) in values.iter_mut().enumerate() {
            // SAFETY: as in `put`.
            *value += unsafe { slot.add(i).read() };
        }
    }

    fn slot(&self, rank: Rank, parity: usize, first: usize, elements: usize) -> *mut f32 {
        let max = self.layout.elements_max;
        assert!(first <= max && elements <= max - first, "{elements} elements from {first} of a slot of {max}");
        let offset = self.layout.slot_offset(rank, parity) + first * size_of::<f32>();
        // SAFETY: by the checks above, the offset is within `layout.bytes`, which are mapped.
        unsafe { self.memory.start.as_ptr().add(offset).cast() }
    }

    fn atomic(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(size_of::<u64>()) && offset < Layout::slots_offset(self.layout.world));
        // SAFETY: the offset is before the slots, so it is mapped for as long as `self`; it is aligned, as the mapping
        // begins on a page; and it is only ever accessed as an atomic, here and in every other process.
        unsafe { AtomicU64::from_ptr(self.memory.start.as_ptr().add(offset).cast()) }
    }
}

/// The bytes of a file that is sealed against shrinking.
#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping stays in place until it is dropped, on whatever thread; accesses to its bytes have their own
// SAFETY arguments.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(fd: &OwnedFd, bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)? };
        Ok(Self { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and no reference to it is left. It fails only for an address that is not mapped.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl SharedState for Mapping {
    type Word = AtomicU64;
    type Futex = AtomicU32;

    fn world(&self) -> WorldSize {
        self.layout.world
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        self.atomic(self.layout.word_offset(word))
    }

    fn futex(&self) -> &AtomicU32 {
        // SAFETY: as in `atomic`: the line is before the slots, and no other word overlaps it.
        unsafe { AtomicU32::from_ptr(self.memory.start.as_ptr().add(FUTEX_LINE * LINE_BYTES).cast()) }
    }

    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }

    fn pause(&self, turn: u32) -> bool {
        if turn < SPINS {
            std::hint::spin_loop();
        } else if turn < TURNS {
            std::thread::yield_now();
        }
        turn < TURNS
    }

    fn park(&self, seen: u32) {
        let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(PARK_MAX.subsec_nanos()) };
        // Woken, interrupted, timed out or failed: the caller checks again in any case.
        let _ = futex::wait(self.futex(), futex::Flags::empty(), seen, Some(&timeout));
    }

    fn wake(&self) {
        // It fails only for an invalid address; this one is mapped.
        let _ = futex::wake(self.futex(), futex::Flags::empty(), i32::MAX as u32);
    }
}
