//! `Segment`: the shared memory of one group. It has no name in any file system, so nothing is left behind when the
//! last process that maps it ends, however it ends.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use types::{Rank, WorldSize};

use super::barrier::{self, BarrierMember, Epoch, EpochCounter, SharedState as _, ShmAbortCause, Word};
use super::comm::ShmComm;
use super::mapping::{Layout, Mapping};
use crate::comm::CommError;

/// The largest segment. Pages that no collective touches take no memory.
pub const SEGMENT_BYTES_MAX: usize = 1 << 34;

const MAGIC: u64 = u64::from_le_bytes(*b"consort\0");
const VERSION: u64 = 7;

/// Indices of words in the first line.
const MAGIC_PLACE: usize = 0;
const VERSION_PLACE: usize = 1;
const WORLD_PLACE: usize = 2;
const ELEMENTS_PLACE: usize = 3;

/// The file can never change its size, so an access to a mapping of it never raises SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    #[error("a segment for {elements_max} elements and {world} ranks exceeds the limit of {SEGMENT_BYTES_MAX} bytes")]
    TooLarge { world: usize, elements_max: usize },
    #[error("not a segment: its size can change")]
    Unsealed,
    #[error("the segment has {found} bytes where {expected} are due")]
    Size { expected: usize, found: u64 },
    #[error("not a segment of a group")]
    Magic,
    #[error("the segment is of version {theirs}, this build uses {ours}")]
    Version { ours: u64, theirs: u64 },
    #[error("the segment is for {elements_max} elements and {world} ranks")]
    Limits { world: u64, elements_max: u64 },
    #[error("cannot {what} a segment")]
    Io { what: &'static str, source: io::Error },
}

/// The limits that a segment is laid out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    pub world: WorldSize,
    /// The most elements (rows times columns) of one collective.
    pub elements_max: usize,
}

impl GroupLimits {
    fn layout(self) -> Result<Layout, SegmentError> {
        let Self { world, elements_max } = self;
        Layout::new(world, elements_max)
            .filter(|layout| layout.bytes <= SEGMENT_BYTES_MAX)
            .ok_or(SegmentError::TooLarge { world: world.get(), elements_max })
    }
}

/// A mapping of a group's memory. Clones share it.
#[derive(Clone, Debug)]
pub struct Segment {
    mapping: Arc<Mapping>,
}

impl Segment {
    /// A new segment, in its first epoch, and the descriptor that other processes attach to. The descriptor is closed
    /// on exec: a supervisor that spawns ranks has to let them inherit it.
    pub fn create(limits: GroupLimits) -> Result<(Self, OwnedFd), SegmentError> {
        let layout = limits.layout()?;
        let io = |source: io::Error| SegmentError::Io { what: "create", source };
        let fd = memfd_create("consort-group", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|errno| io(errno.into()))?;
        let file = File::from(fd);
        file.set_len(layout.bytes as u64).map_err(io)?;
        let fd = OwnedFd::from(file);
        fcntl_add_seals(&fd, SEALS).map_err(|errno| io(errno.into()))?;
        let mapping = Mapping::new(&fd, layout).map_err(io)?;
        for (place, value) in title(limits) {
            mapping.title(place).store(value, Relaxed);
        }
        mapping.word(Word::State).store(EpochCounter { epoch: Epoch::FIRST, number: 0 }.word(), Relaxed);
        Ok((Self { mapping: Arc::new(mapping) }, fd))
    }

    /// Maps a segment that another process created with the same limits.
    pub fn attach(fd: OwnedFd, limits: GroupLimits) -> Result<Self, SegmentError> {
        let layout = limits.layout()?;
        let io = |source: io::Error| SegmentError::Io { what: "attach to", source };
        if !fcntl_get_seals(&fd).map_err(|errno| io(errno.into()))?.contains(SEALS) {
            return Err(SegmentError::Unsealed);
        }
        let file = File::from(fd);
        let found = file.metadata().map_err(io)?.len();
        if found != layout.bytes as u64 {
            return Err(SegmentError::Size { expected: layout.bytes, found });
        }
        let mapping = Mapping::new(&OwnedFd::from(file), layout).map_err(io)?;
        check_header(limits, |place| mapping.title(place).load(Relaxed))?;
        Ok(Self { mapping: Arc::new(mapping) })
    }

    /// The current epoch.
    pub fn epoch(&self) -> Epoch {
        barrier::present(&*self.mapping)
    }

    /// Joins as `rank`. This succeeds once per rank and epoch.
    pub fn join(&self, rank: Rank, epoch: Epoch) -> Result<ShmComm, CommError> {
        let member = BarrierMember::join(&*self.mapping, rank, epoch)?;
        Ok(ShmComm::new(self.clone(), member))
    }

    /// Aborts `epoch` on all ranks.
    pub fn abort(&self, epoch: Epoch) -> Abort {
        Abort { segment: self.clone(), epoch }
    }

    /// Ends the current epoch and begins the next, which all ranks may join. Only the group's one supervisor calls it,
    /// when it knows that no rank is in a collective: all have left with an error, or are dead.
    pub fn begin_epoch(&self) -> Result<Epoch, CommError> {
        barrier::begin_epoch(&*self.mapping)
    }

    /// The rank that the others wait for in `epoch`, if they wait for one.
    pub fn last_to_arrive(&self, epoch: Epoch) -> Option<Rank> {
        barrier::last_to_arrive(&*self.mapping, epoch)
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// Aborts one epoch of a group, from any thread of any attached process. The first cause stays.
#[derive(Clone, Debug)]
pub struct Abort {
    segment: Segment,
    epoch: Epoch,
}

impl Abort {
    /// Every wait, and every collective from now on, fails with [`CommError::Aborted`].
    pub fn stop(&self) {
        barrier::abort(self.segment.mapping(), self.epoch, ShmAbortCause::Aborted);
    }

    /// Every wait, and every collective from now on, fails with [`CommError::Lost`].
    pub fn lost(&self, rank: Rank) {
        barrier::abort(self.segment.mapping(), self.epoch, ShmAbortCause::Lost(rank));
    }

    /// Why the epoch is over, if it is.
    pub fn cause(&self) -> Option<CommError> {
        barrier::check(self.segment.mapping(), self.epoch).err()
    }
}

fn title(limits: GroupLimits) -> [(usize, u64); 4] {
    [
        (MAGIC_PLACE, MAGIC),
        (VERSION_PLACE, VERSION),
        (WORLD_PLACE, limits.world.get() as u64),
        (ELEMENTS_PLACE, limits.elements_max as u64),
    ]
}

fn check_header(limits: GroupLimits, word: impl Fn(usize) -> u64) -> Result<(), SegmentError> {
    if word(MAGIC_PLACE) != MAGIC {
        return Err(SegmentError::Magic);
    }
    let theirs = word(VERSION_PLACE);
    if theirs != VERSION {
        return Err(SegmentError::Version { ours: VERSION, theirs });
    }
    let (world, elements_max) = (word(WORLD_PLACE), word(ELEMENTS_PLACE));
    if (world, elements_max) != (limits.world.get() as u64, limits.elements_max as u64) {
        return Err(SegmentError::Limits { world, elements_max });
    }
    Ok(())
}
