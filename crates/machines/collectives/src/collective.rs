//! `GroupCollective`: the `Collective` of a rank's models. It runs the current group's communicator on a backend's
//! buffers and counts the time. It outlives a group, as the models and their weights do. `AbortHandle` aborts a group
//! from other threads.
//!
//! Activations in host memory are reduced in place; others are copied through host memory, in chunks of whole rows that
//! are no larger than the communicator accepts. All ranks cut the same chunks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kernels::{Backend, BackendError};
use model::{Collective, CollectiveError, MapRows};
use types::{Rank, WorldSize};

use crate::comm::{CommError, Communicator};
use crate::shared_memory::{Abort, Epoch, ShmComm};
use crate::tcp::{TcpAbort, TcpComm};

/// Elements of a chunk, unless a row is longer: both slots of a few ranks fit in a core's own cache.
const CHUNK_ELEMENTS: usize = 1 << 17;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rank is in no group")]
pub struct NoGroup;

/// Clones share the group and the counters.
#[derive(Clone, Debug)]
pub struct GroupCollective {
    rank: Rank,
    group: Arc<Mutex<JoinedComm>>,
    abort: AbortHandle,
    meter: Arc<Meter>,
}

#[derive(Debug, Default)]
struct JoinedComm {
    comm: Option<Box<dyn Communicator>>,
    /// The rows of a buffer that is not in host memory.
    staging: Vec<f32>,
    /// This rank's columns of such a buffer.
    part: Vec<f32>,
}

#[derive(Debug, Default)]
struct Meter {
    calls: AtomicU64,
    ns: AtomicU64,
}

impl GroupCollective {
    pub fn new(rank: Rank) -> Self {
        Self { rank, group: Arc::default(), abort: AbortHandle::default(), meter: Arc::default() }
    }

    /// For a group that never changes.
    pub fn over(comm: impl Communicator + 'static) -> Self {
        let collective = Self::new(comm.rank());
        collective.lock().comm = Some(Box::new(comm));
        collective
    }

    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    /// Replaces the communicator. Fails if its epoch has been aborted already.
    pub fn join(&self, comm: ShmComm) -> Result<(), CommError> {
        self.abort.hold(GroupAbort::Shm(comm.abort()), comm.epoch());
        let over = comm.abort().cause();
        self.lock().comm = Some(Box::new(comm));
        over.map_or(Ok(()), Err)
    }

    /// Replaces the communicator with the one that `connect` returns. It can be aborted while `connect` runs. Whether
    /// that succeeds or not, the rank has left its previous group.
    pub fn connect<E>(&self, epoch: Epoch, connect: impl FnOnce(&TcpAbort) -> Result<TcpComm, E>) -> Result<(), E> {
        self.leave();
        let abort = TcpAbort::default();
        self.abort.hold(GroupAbort::Tcp(abort.clone()), epoch);
        let comm = connect(&abort).inspect_err(|_| self.abort.release())?;
        self.lock().comm = Some(Box::new(comm));
        Ok(())
    }

    /// Leaves the group.
    pub fn leave(&self) {
        self.abort.release();
        self.lock().comm = None;
    }

    /// Whether collectives can be called: a world of one needs no group.
    pub fn is_complete(&self) -> bool {
        self.rank.world() == WorldSize::ONE || self.lock().comm.is_some()
    }

    /// The epoch of the group, if there is one.
    pub fn epoch(&self) -> Option<Epoch> {
        self.abort.epoch()
    }

    /// Aborts the epoch, because this rank has left a step that the other ranks still run.
    pub fn abandon(&self) {
        if let Some(abort) = self.abort.held() {
            abort.lost(self.rank);
        }
    }

    /// Collectives so far, and the microseconds spent in them.
    pub fn spent(&self) -> (u64, u64) {
        (self.meter.calls.load(Relaxed), self.meter.ns.load(Relaxed) / 1000)
    }

    /// Runs `exchange` with the communicator; does nothing in a world of one. A failure of the backend ends the group,
    /// so that the other ranks do not wait for this one.
    fn call(
        &self,
        exchange: impl FnOnce(&mut JoinedComm, &mut dyn Communicator) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        if self.rank.world() == WorldSize::ONE {
            return Ok(());
        }
        let begun = Instant::now();
        let mut group = self.lock();
        let Some(mut comm) = group.comm.take() else { return Err(CollectiveError::Transport(Box::new(NoGroup))) };
        let result = exchange(&mut group, &mut *comm);
        if let Err(CollectiveError::Backend(_)) = result {
            comm.leave();
        }
        group.comm = Some(comm);
        self.meter.calls.fetch_add(1, Relaxed);
        self.meter.ns.fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
        result
    }

    fn lock(&self) -> MutexGuard<'_, JoinedComm> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Collective<B> for GroupCollective {
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.call(|group, comm| {
            let cols = backend.columns(buffer);
            let chunk = chunk_rows(comm, cols)? * cols;
            let mut reduce =
                |values: &mut [f32]| values.chunks_mut(chunk.max(1)).try_for_each(|values| comm.all_reduce(values));
            if let Some(values) = backend.host_rows_mut(buffer, rows) {
                return Ok(reduce(values)?);
            }
            let values = staged(&mut group.staging, rows.saturating_mul(cols))?;
            backend.read(buffer, 0..rows, values)?;
            reduce(values)?;
            Ok(backend.write(buffer, values)?)
        })
    }

    /// The time that `map` takes is not counted.
    fn reduce_into(
        &self,
        backend: &B,
        rows: usize,
        from: &mut B::Buffer,
        to: &mut B::Buffer,
        map: &mut MapRows<'_, B>,
    ) -> Result<(), CollectiveError> {
        let is_here = backend.host_rows_mut(from, rows).is_some() && backend.host_rows_mut(to, rows).is_some();
        let cols = backend.columns(from);
        if self.rank.world() == WorldSize::ONE || !is_here || cols != backend.columns(to) {
            self.all_reduce(backend, rows, from)?;
            map(from, to, 0..rows);
            return Ok(());
        }
        let mut mapping = Duration::ZERO;
        let result = self.call(|_, comm| {
            let here = "it was in this process's memory before";
            for chunk in chunks(rows, largest_rows(comm, cols)?) {
                let elements = chunk.start * cols..chunk.end * cols;
                let values = &mut backend.host_rows_mut(from, rows).expect(here)[elements.clone()];
                let own = comm.reduce_scatter_rows(cols, values)?;
                let begun = Instant::now();
                map(from, to, chunk.start + own.start..chunk.start + own.end);
                mapping += begun.elapsed();
                let values = &mut backend.host_rows_mut(to, rows).expect(here)[elements];
                comm.all_gather_rows(cols, values)?;
            }
            Ok(())
        });
        self.meter.ns.fetch_sub(mapping.as_nanos() as u64, Relaxed);
        result
    }

    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError> {
        self.call(|JoinedComm { staging, part: own, .. }, comm| {
            let (at_once, width) = (chunk_rows(comm, cols)?, self.rank.shard(cols).len());
            let own = match backend.host_rows(part, rows) {
                Some(own) => own,
                None => {
                    let own = staged(own, rows.saturating_mul(width))?;
                    backend.read(part, 0..rows, own)?;
                    own
                }
            };
            let mut gather = |mut whole: Option<&mut [f32]>| {
                chunks(rows, at_once).try_for_each(|chunk| {
                    let all = whole.as_mut().map(|whole| &mut whole[chunk.start * cols..chunk.end * cols]);
                    let own = &own[chunk.start * width..chunk.end * width];
                    comm.gather_columns([chunk.len(), cols], own, all)
                })
            };
            let Some(whole) = whole else { return Ok(gather(None)?) };
            if let Some(whole) = backend.host_rows_mut(whole, rows) {
                return Ok(gather(Some(whole))?);
            }
            let values = staged(staging, rows.saturating_mul(cols))?;
            gather(Some(&mut *values))?;
            Ok(backend.write(whole, values)?)
        })
    }
}

/// The most whole rows of `cols` columns in one collective.
fn largest_rows(comm: &dyn Communicator, cols: usize) -> Result<usize, CommError> {
    let elements_max = comm.elements_max();
    if cols > elements_max {
        return Err(CommError::TooLarge { elements: cols, elements_max });
    }
    Ok(elements_max.checked_div(cols).unwrap_or(usize::MAX))
}

/// Whole rows of a chunk that stays in the cache.
fn chunk_rows(comm: &dyn Communicator, cols: usize) -> Result<usize, CommError> {
    Ok(largest_rows(comm, cols)?.min((CHUNK_ELEMENTS / cols.max(1)).max(1)))
}

/// `rows` rows, `at_once` at a time.
fn chunks(rows: usize, at_once: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(at_once).map(move |first| first..rows.min(first.saturating_add(at_once)))
}

/// The first `elements` of `values`, which grow as needed.
fn staged(values: &mut Vec<f32>, elements: usize) -> Result<&mut [f32], BackendError> {
    if values.len() < elements {
        let bytes = elements.saturating_mul(size_of::<f32>());
        values
            .try_reserve_exact(elements - values.len())
            .map_err(|_| BackendError::OutOfMemory { what: "an exchange between ranks", bytes })?;
        values.resize(elements, 0.0);
    }
    Ok(&mut values[..elements])
}

/// Aborts an epoch, whatever the transport.
#[derive(Clone, Debug)]
enum GroupAbort {
    Shm(Abort),
    Tcp(TcpAbort),
}

impl GroupAbort {
    fn stop(&self) {
        match self {
            Self::Shm(abort) => abort.stop(),
            Self::Tcp(abort) => abort.stop(),
        }
    }

    fn lost(&self, rank: Rank) {
        match self {
            Self::Shm(abort) => abort.lost(rank),
            Self::Tcp(abort) => abort.lost(rank),
        }
    }
}

/// Aborts epochs from any thread, also while a collective runs.
#[derive(Clone, Debug, Default)]
pub struct AbortHandle(Arc<Mutex<AbortState>>);

#[derive(Debug, Default)]
struct AbortState {
    present: Option<(GroupAbort, Epoch)>,
    /// An epoch that was aborted before this rank joined it.
    early: Option<u32>,
    ended: bool,
}

impl AbortHandle {
    /// Aborts this epoch of the group, now or as soon as this rank joins it.
    pub fn abort(&self, epoch: u32) {
        let mut state = self.lock();
        match &state.present {
            Some((abort, present)) if present.0 == epoch => abort.stop(),
            Some((_, present)) if present.0 > epoch => {}
            _ => state.early = Some(epoch),
        }
    }

    /// Aborts the current and every later epoch, because the supervisor is gone.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        if let Some((abort, _)) = &state.present {
            abort.stop();
        }
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    fn hold(&self, abort: GroupAbort, epoch: Epoch) {
        let mut state = self.lock();
        if state.early.take() == Some(epoch.0) || state.ended {
            abort.stop();
        }
        state.present = Some((abort, epoch));
    }

    fn release(&self) {
        self.lock().present = None;
    }

    fn held(&self) -> Option<GroupAbort> {
        self.lock().present.as_ref().map(|(abort, _)| abort.clone())
    }

    fn epoch(&self) -> Option<Epoch> {
        self.lock().present.as_ref().map(|&(_, epoch)| epoch)
    }

    fn lock(&self) -> MutexGuard<'_, AbortState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::shared_memory::{GroupLimits, Segment};

    fn segment() -> Segment {
        Segment::create(GroupLimits { world: WorldSize::ONE, elements_max: 1 }).unwrap().0
    }

    fn join(collective: &GroupCollective, segment: &Segment) -> Result<(), CommError> {
        collective.join(segment.join(Rank::SINGLE, segment.epoch()).unwrap())
    }

    #[test]
    fn a_generation_that_was_ended_early_does_not_begin() {
        let (collective, segment) = (GroupCollective::new(Rank::SINGLE), segment());
        collective.abort_handle().abort(1);
        assert_eq!(join(&collective, &segment), Err(CommError::Aborted));
        segment.begin_epoch().unwrap();
        assert_eq!(join(&collective, &segment), Ok(()));
        assert_eq!(collective.epoch(), Some(Epoch(2)));
    }

    #[test]
    fn the_end_of_an_old_generation_does_not_touch_the_new_one() {
        let (collective, segment) = (GroupCollective::new(Rank::SINGLE), segment());
        segment.begin_epoch().unwrap();
        join(&collective, &segment).unwrap();
        collective.abort_handle().abort(1);
        assert_eq!(segment.abort(segment.epoch()).cause(), None);
        collective.abort_handle().abort(2);
        assert_eq!(segment.abort(segment.epoch()).cause(), Some(CommError::Aborted));
    }

    #[test]
    fn nothing_begins_after_the_end() {
        let (collective, segment) = (GroupCollective::new(Rank::SINGLE), segment());
        collective.abort_handle().end();
        assert_eq!(join(&collective, &segment), Err(CommError::Aborted));
    }

    #[test]
    fn hosts_that_were_told_to_stop_do_not_connect() {
        let collective = GroupCollective::new(Rank::SINGLE);
        collective.abort_handle().abort(3);
        let connected = collective.connect(Epoch(3), |abort| Err::<TcpComm, _>(abort.cause()));
        assert_eq!(connected, Err(Some(CommError::Aborted)));
        assert_eq!(collective.epoch(), None);
        let told = collective.connect(Epoch(4), |abort| {
            collective.abort_handle().abort(4);
            Err::<TcpComm, _>(abort.cause())
        });
        assert_eq!(told, Err(Some(CommError::Aborted)));
    }

    #[test]
    fn only_a_world_of_one_is_complete_without_a_group() {
        let two = WorldSize::new(2).and_then(|world| world.rank(1)).unwrap();
        assert!(GroupCollective::new(Rank::SINGLE).is_complete() && !GroupCollective::new(two).is_complete());
    }
}
