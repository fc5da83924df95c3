//! `Mapping`: a segment in this process's memory: words, a bell, slots and rooms of numbers, at places that the limits alone
//! determine. All of the module's `unsafe` is here.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kernels::SharedMemory;
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::thread::futex;
use types::{Rank, WorldSize};

use super::barrier::{Board, Word, atomics};

/// Words that different ranks write lie on different lines, and so do slots. Two cache lines: processors fetch pairs.
const LINE_BYTES: usize = 128;

/// The first line says what the segment is and never changes; then one line for the state, one for the bell of all, and
/// two for each rank: what the others look at while they wait, and what there is to a loan.
const STATE_LINE: usize = 1;
const BELL_LINE: usize = 2;
const RANK_LINES: usize = 3;
const LINES_OF_RANK: usize = 2;

/// A room has place for as many slots: the rows of a large step, where an exchange takes some at a time. A rank has two.
const ROOM_SLOTS: usize = 4;
const ROOMS: usize = 2;
/// Rooms begin with a huge page, so that the system can give them some.
const HUGE_PAGE_BYTES: usize = 2 << 20;

const SPINS: u32 = 2_000;
/// Turns after which a wait parks: tens of milliseconds. Until then they give way to others, because the rank that is waited for may need
/// this core. Ranks that park within a step pay for it: in a virtual machine of two cores both were half as fast for most of a prompt.
const TURNS: u32 = 100_000;
/// A parked rank looks again after this even if nobody wakes it: a peer may have spoiled the bell.
const PARK_MAX: Duration = Duration::from_millis(20);
/// The same for a guest that waits for a loan, and for the same reason.
const REST_MAX: Duration = Duration::from_secs(1);

atomics!(AtomicU64: u64, AtomicU32: u32);

/// Where everything lies in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub world: WorldSize,
    pub elements_max: usize,
    slot_bytes: usize,
    room_bytes: usize,
    rooms_offset: usize,
    pub bytes: usize,
}

/// Where a rank's numbers are: in one of its two slots, or in a room.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Slot(Rank, usize),
    Room(Rank, Room),
}

/// What somebody sleeps on. It changes when there is reason to look again.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bell {
    /// Ranks that are parked at the barrier.
    All,
    /// The guest of this rank, which waits for a loan.
    Guest(Rank),
    /// This rank, while a guest has its CPU.
    Lender(Rank),
}

/// A rank's rooms.
#[derive(Clone, Copy, Debug)]
pub(super) enum Room {
    /// For rows that it brings to be summed.
    Brought,
    /// For those that it makes of sums.
    Made,
}

impl Layout {
    /// `None` if it cannot be counted.
    pub fn new(world: WorldSize, elements_max: usize) -> Option<Self> {
        let slot_bytes = elements_max.checked_mul(size_of::<f32>())?.checked_next_multiple_of(LINE_BYTES)?;
        let slots = slot_bytes.checked_mul(2 * world.get())?;
        let slots_end = Self::slots_offset(world).checked_add(slots)?;
        let rooms_offset = slots_end.checked_next_multiple_of(HUGE_PAGE_BYTES)?;
        let room_bytes = slot_bytes.checked_mul(ROOM_SLOTS)?.checked_next_multiple_of(HUGE_PAGE_BYTES)?;
        let rooms = room_bytes.checked_mul(ROOMS)?.checked_mul(world.get())?;
        let bytes = rooms_offset.checked_add(rooms)?;
        Some(Self { world, elements_max, slot_bytes, room_bytes, rooms_offset, bytes })
    }

    /// Elements of a room.
    pub fn room_elements(&self) -> usize {
        ROOM_SLOTS * self.elements_max
    }

    fn slots_offset(world: WorldSize) -> usize {
        (RANK_LINES + LINES_OF_RANK * world.get()) * LINE_BYTES
    }

    fn word_offset(&self, word: Word) -> usize {
        let of_rank = |rank: Rank, line: usize| RANK_LINES + LINES_OF_RANK * rank.index() + line;
        let (line, place) = match word {
            Word::State => (STATE_LINE, 0),
            Word::Arrived(rank) => (of_rank(rank, 0), 0),
            Word::Asleep(rank) => (of_rank(rank, 0), 1),
            Word::Call(rank, parity) => (of_rank(rank, 0), 2 + parity),
            Word::Loan(rank) => (of_rank(rank, 1), 0),
            Word::Lent(rank) => (of_rank(rank, 1), 1),
            Word::Cpu(rank) => (of_rank(rank, 1), 2),
        };
        line * LINE_BYTES + place * size_of::<u64>()
    }

    fn bell_offset(&self, bell: Bell) -> usize {
        let of_rank = |rank: Rank, place: usize| {
            assert_eq!(rank.world(), self.world, "a bell of {rank}");
            (RANK_LINES + LINES_OF_RANK * rank.index() + 1) * LINE_BYTES + place * size_of::<u64>()
        };
        match bell {
            Bell::All => BELL_LINE * LINE_BYTES,
            Bell::Guest(rank) => of_rank(rank, 3),
            Bell::Lender(rank) => of_rank(rank, 4),
        }
    }

    /// Where a place begins, and how many elements it has.
    fn place(&self, place: Place) -> (usize, usize) {
        match place {
            Place::Slot(rank, parity) => {
                assert!(rank.world() == self.world && parity < 2, "slot {parity} of {rank}");
                let index = parity * self.world.get() + rank.index();
                (Self::slots_offset(self.world) + index * self.slot_bytes, self.elements_max)
            }
            Place::Room(rank, room) => {
                assert_eq!(rank.world(), self.world, "a room of {rank}");
                let index = rank.index() * ROOMS + room as usize;
                (self.rooms_offset + index * self.room_bytes, self.room_elements())
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Mapping {
    layout: Layout,
    memory: Memory,
}

impl Mapping {
    /// Maps `fd`, which the caller has shown to have the layout's size and to be sealed: else a touch could be fatal.
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

    /// A room of `rank`. Who asks for it, as that rank, does so once.
    pub fn room(self: &Arc<Self>, rank: Rank, room: Room) -> SharedMemory {
        let bytes = self.layout.room_elements() * size_of::<f32>();
        let start = NonNull::new(self.at(Place::Room(rank, room), 0, 0).cast()).expect("inside a mapping");
        // SAFETY: the room lies within the mapping, which lives as long as `self`, and begins at a line of it; this process reads or
        // writes it through this memory only, but for ranks that are threads of one process and read as others do. They do so between
        // two barriers, while its owner writes only rows that they do not read.
        unsafe { SharedMemory::new(start, bytes, self.clone()) }
    }

    /// Whether `values` are what a room of `rank` has from its element `first` on.
    pub fn is_in_room(&self, rank: Rank, room: Room, first: usize, values: &[f32]) -> bool {
        let (fits, room) = (self.has_room(first, values.len()), Place::Room(rank, room));
        fits && std::ptr::eq(self.at(room, first, values.len()).cast_const(), values.as_ptr())
    }

    /// Whether a room has so many elements from `first` on.
    pub fn has_room(&self, first: usize, elements: usize) -> bool {
        first.checked_add(elements).is_some_and(|end| end <= self.layout.room_elements())
    }

    /// Copies `values` into a slot, from its element `first` on.
    pub fn put(&self, rank: Rank, parity: usize, first: usize, values: &[f32]) {
        let slot = self.at(Place::Slot(rank, parity), first, values.len());
        // SAFETY: `at` has shown that the elements lie in the mapping, and no memory that anyone refers to overlaps a slot. Peers that keep to the barrier do not touch them now. One that does not can only spoil numbers: every bit
        // pattern is an `f32`.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), slot, values.len()) };
    }

    /// Copies a place's elements from `first` on into `values`.
    pub fn get(&self, place: Place, first: usize, values: &mut [f32]) {
        let slot = self.at(place, first, values.len());
        // SAFETY: as in `put`. A room that is read is another rank's, so `values` are not in it.
        unsafe { std::ptr::copy_nonoverlapping(slot.cast_const(), values.as_mut_ptr(), values.len()) };
    }

    /// Adds a place's elements from `first` on to `values`.
    pub fn add(&self, place: Place, first: usize, values: &mut [f32]) {
        let slot = self.at(place, first, values.len()).cast_const();
        for (i, value) in values.iter_mut().enumerate() {
            // SAFETY: as in `get`.
            *value += unsafe { slot.add(i).read() };
        }
    }

    pub fn bell_of(&self, bell: Bell) -> &AtomicU32 {
        // SAFETY: as in `atomic`: it lies in a line that every layout has. No other word overlaps it.
        unsafe { AtomicU32::from_ptr(self.memory.start.as_ptr().add(self.layout.bell_offset(bell)).cast()) }
    }

    /// Lets all who sleep on it look again.
    pub fn ring_at(&self, bell: Bell) {
        self.bell_of(bell).fetch_add(1, Ordering::Release);
        self.wake_at(bell);
    }

    fn wake_at(&self, bell: Bell) {
        // It fails only for an address that is not there; this one is mapped.
        let _ = futex::wake(self.bell_of(bell), futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until woken, but not long, if the bell still shows `seen`.
    pub fn sleep(&self, bell: Bell, seen: u32) {
        let max = if matches!(bell, Bell::Guest(_)) { REST_MAX } else { PARK_MAX };
        let timeout = futex::Timespec { tv_sec: max.as_secs() as i64, tv_nsec: i64::from(max.subsec_nanos()) };
        // Woken, interrupted, too late or refused: the caller looks again in any case.
        let _ = futex::wait(self.bell_of(bell), futex::Flags::empty(), seen, Some(&timeout));
    }

    fn at(&self, place: Place, first: usize, elements: usize) -> *mut f32 {
        let (offset, max) = self.layout.place(place);
        assert!(
            first <= max && elements <= max - first,
            "{elements} elements from {first} of {place:?}, which has {max}"
        );
        // SAFETY: with the above, it is within `layout.bytes`, which are mapped.
        unsafe { self.memory.start.as_ptr().add(offset + first * size_of::<f32>()).cast() }
    }

    fn atomic(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(size_of::<u64>()) && offset < Layout::slots_offset(self.layout.world));
        // SAFETY: the place lies before the slots, so it is mapped for as long as `self`; it is aligned, as the mapping
        // begins on a page; and it is only ever used as an atomic, here and in every other process.
        unsafe { AtomicU64::from_ptr(self.memory.start.as_ptr().add(offset).cast()) }
    }
}

/// Bytes of a file that is sealed against shrinking, from a multiple of a huge page on.
#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it stays where it is until it is dropped; who uses its bytes, from whatever thread, answers for that.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(fd: &OwnedFd, bytes: usize) -> io::Result<Self> {
        let room = bytes.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: new memory, wherever the system has room.
        let found = unsafe { mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)? };
        let before = found.cast::<u8>().align_offset(HUGE_PAGE_BYTES);
        let (flags, protection) = (MapFlags::SHARED | MapFlags::FIXED, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: what was found is this function's own, and nobody knows of it. The file takes the place of a part of it; the rest, whole
        // pages before and after, is given back.
        unsafe {
            let start = found.cast::<u8>().add(before);
            let mapped = mm::mmap(start.cast(), bytes, protection, flags, fd, 0);
            let used = mapped.map_or(0, |_| bytes.next_multiple_of(rustix::param::page_size()));
            for (at, bytes) in [(found.cast::<u8>(), before), (start.add(used), room - before - used)] {
                if bytes > 0 {
                    mm::munmap(at.cast(), bytes)?;
                }
            }
            let start = NonNull::new(mapped?.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Self { start, bytes })
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and nobody refers to it any more. It fails only for what is not mapped.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

impl Board for Mapping {
    type Word = AtomicU64;
    type Bell = AtomicU32;

    fn world(&self) -> WorldSize {
        self.layout.world
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        self.atomic(self.layout.word_offset(word))
    }

    fn bell(&self) -> &AtomicU32 {
        self.bell_of(Bell::All)
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
        self.sleep(Bell::All, seen);
    }

    fn wake(&self) {
        self.wake_at(Bell::All);
    }
}
