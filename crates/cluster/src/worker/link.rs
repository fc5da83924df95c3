//! `Link`: what connects the models of a rank with the other ranks. A group comes and goes; models, and the weights in
//! them, stay. `Lifeline` is the end of it that other threads hold.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kernels::cpu::Guest;
use kernels::{Backend, Rows};
use model::{Collective, CollectiveError, EachRows, Rooms, Solo};
use types::{Rank, WorldSize};

use super::helper::Helper;
use crate::Exchange;
use crate::shared_memory::{Abort, Generation, GroupError, Seat};
use crate::tcp::{Mesh, TcpAbort};

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the rank has no seat in a group")]
pub struct NoGroup;

/// Clones are the same link. It counts collectives and the time that they take.
#[derive(Clone, Debug)]
pub struct Link {
    rank: Rank,
    group: Arc<Mutex<Option<Group>>>,
    lifeline: Lifeline,
    helper: Arc<Helper>,
    meter: Arc<Meter>,
}

/// A place among ranks of this host, or of several.
#[derive(Debug)]
enum Group {
    Here(Exchange<Seat>),
    Hosts(Exchange<Mesh>),
}

impl Group {
    fn collective<B: Backend>(&self) -> &dyn Collective<B> {
        match self {
            Self::Here(exchange) => exchange,
            Self::Hosts(exchange) => exchange,
        }
    }

    /// How long others have worked on this rank's CPU, since the last call.
    fn take_lent(&mut self) -> Duration {
        match self {
            Self::Here(exchange) => exchange.joint_mut().take_lent(),
            Self::Hosts(_) => Duration::ZERO,
        }
    }
}

#[derive(Debug, Default)]
struct Meter {
    calls: AtomicU64,
    ns: AtomicU64,
    lent_ns: AtomicU64,
}

impl Link {
    pub fn new(rank: Rank) -> Self {
        Self {
            rank,
            group: Arc::default(),
            lifeline: Lifeline::default(),
            helper: Arc::default(),
            meter: Arc::default(),
        }
    }

    pub fn lifeline(&self) -> Lifeline {
        self.lifeline.clone()
    }

    /// From now on this seat is used. Fails if its generation was ended before it could be taken.
    pub fn join(&self, seat: Seat) -> Result<(), GroupError> {
        self.lifeline.hold(Ending::Here(seat.abort()), seat.generation());
        let over = seat.abort().cause();
        self.helper.borrow_from(Some(seat.borrower()));
        *self.lock() = Some(Group::Here(Exchange::new(seat)));
        over.map_or(Ok(()), Err)
    }

    /// From now on what `connect` gives is used. It can be ended while it is being made. Whatever comes of it, the group before
    /// is over.
    pub fn connect<E>(
        &self,
        generation: Generation,
        connect: impl FnOnce(&TcpAbort) -> Result<Mesh, E>,
    ) -> Result<(), E> {
        self.leave();
        let abort = TcpAbort::default();
        self.lifeline.hold(Ending::Hosts(abort.clone()), generation);
        let mesh = connect(&abort).inspect_err(|_| self.lifeline.release())?;
        *self.lock() = Some(Group::Hosts(Exchange::new(mesh)));
        Ok(())
    }

    /// Without a group again.
    pub fn leave(&self) {
        self.lifeline.release();
        self.helper.borrow_from(None);
        *self.lock() = None;
    }

    /// From now on this rank's computation is helped with, where others lend their CPUs.
    pub fn invite(&self, guest: Guest) {
        self.helper.help(guest);
    }

    /// Whether collectives can be called: a world of one needs no group.
    pub fn is_complete(&self) -> bool {
        self.rank.world() == WorldSize::ONE || self.lock().is_some()
    }

    /// Of the group, if there is one.
    pub fn generation(&self) -> Option<Generation> {
        self.lifeline.generation()
    }

    /// Ends the generation: this rank has left the step that the others run.
    pub fn abandon(&self) {
        if let Some(abort) = self.lifeline.held() {
            abort.lost(self.rank);
        }
    }

    /// Collectives so far, and microseconds in them, but for those in which others have worked on this rank's CPU.
    pub fn spent(&self) -> (u64, u64) {
        (self.meter.calls.load(Relaxed), self.meter.ns.load(Relaxed) / 1000)
    }

    /// Microseconds for which others have worked on this rank's CPU.
    pub fn lent_us(&self) -> u64 {
        self.meter.lent_ns.load(Relaxed) / 1000
    }

    fn call<B: Backend>(
        &self,
        exchange: impl FnOnce(&dyn Collective<B>) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let begun = Instant::now();
        let mut lent = Duration::ZERO;
        let result = match &mut *self.lock() {
            Some(group) => {
                let result = exchange(group.collective());
                lent = group.take_lent();
                result
            }
            None if self.rank.world() == WorldSize::ONE => exchange(&Solo),
            None => Err(CollectiveError::Transport(Box::new(NoGroup))),
        };
        self.meter.calls.fetch_add(1, Relaxed);
        self.meter.lent_ns.fetch_add(lent.as_nanos() as u64, Relaxed);
        self.meter.ns.fetch_add(begun.elapsed().saturating_sub(lent).as_nanos() as u64, Relaxed);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Option<Group>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Collective<B> for Link {
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.call(|group| group.all_reduce(backend, rows, buffer))
    }

    /// The time that `each` takes is not the collective's.
    fn reduce_into(
        &self,
        backend: &B,
        rows: Rows,
        from: &mut B::Buffer,
        to: &mut B::Buffer,
        reader: Option<&B::Matrix>,
        each: &mut EachRows<'_, B>,
    ) -> Result<(), CollectiveError> {
        let mut at_work = Duration::ZERO;
        let mut timed = |from: &B::Buffer, to: &mut B::Buffer, rows: Range<usize>| {
            let begun = Instant::now();
            each(from, to, rows);
            at_work += begun.elapsed();
        };
        let result = self.call(|group| group.reduce_into(backend, rows, from, to, reader, &mut timed));
        self.meter.ns.fetch_sub(at_work.as_nanos() as u64, Relaxed);
        result
    }

    fn rooms(&self) -> Option<Rooms> {
        self.lock().as_ref().and_then(|group| group.collective::<B>().rooms())
    }

    fn all_gather(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.call(|group| group.all_gather(backend, rows, buffer))
    }

    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError> {
        self.call(|group| group.gather_columns(backend, rows, cols, part, whole))
    }

    fn gather_values(&self, own: &[f32], all: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        self.call(|group: &dyn Collective<B>| group.gather_values(own, all))
    }

    fn broadcast(&self, backend: &B, root: Rank, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.call(|group| group.broadcast(backend, root, rows, buffer))
    }
}

/// What ends a generation, whatever connects its ranks.
#[derive(Clone, Debug)]
enum Ending {
    Here(Abort),
    Hosts(TcpAbort),
}

impl Ending {
    fn stop(&self) {
        match self {
            Self::Here(abort) => abort.stop(),
            Self::Hosts(abort) => abort.stop(),
        }
    }

    fn lost(&self, rank: Rank) {
        match self {
            Self::Here(abort) => abort.lost(rank),
            Self::Hosts(abort) => abort.lost(rank),
        }
    }
}

/// Ends generations from any thread, also while a collective runs.
#[derive(Clone, Debug, Default)]
pub struct Lifeline(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    present: Option<(Ending, Generation)>,
    /// Was ended before this rank came to it.
    early: Option<u32>,
    ended: bool,
}

impl Lifeline {
    /// Ends this generation of the group, or lets it end as soon as it begins here.
    pub fn abort(&self, generation: u32) {
        let mut held = self.lock();
        match &held.present {
            Some((abort, present)) if present.0 == generation => abort.stop(),
            Some((_, present)) if present.0 > generation => {}
            _ => held.early = Some(generation),
        }
    }

    /// Ends every generation, present and to come: the leader is gone.
    pub fn end(&self) {
        let mut held = self.lock();
        held.ended = true;
        if let Some((abort, _)) = &held.present {
            abort.stop();
        }
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    fn hold(&self, abort: Ending, generation: Generation) {
        let mut held = self.lock();
        if held.early.take() == Some(generation.0) || held.ended {
            abort.stop();
        }
        held.present = Some((abort, generation));
    }

    fn release(&self) {
        self.lock().present = None;
    }

    fn held(&self) -> Option<Ending> {
        self.lock().present.as_ref().map(|(abort, _)| abort.clone())
    }

    fn generation(&self) -> Option<Generation> {
        self.lock().present.as_ref().map(|&(_, generation)| generation)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::shared_memory::{GroupLimits, Segment};
    use crate::tcp::MeshError;

    fn segment() -> Segment {
        Segment::create(GroupLimits { world: WorldSize::ONE, elements_max: 1 }).unwrap().0
    }

    fn join(link: &Link, segment: &Segment) -> Result<(), GroupError> {
        link.join(segment.seat(Rank::SOLO, segment.generation()).unwrap())
    }

    #[test]
    fn a_generation_that_was_ended_early_does_not_begin() {
        let (link, segment) = (Link::new(Rank::SOLO), segment());
        link.lifeline().abort(1);
        assert_eq!(join(&link, &segment), Err(GroupError::Aborted));
        segment.reform().unwrap();
        assert_eq!(join(&link, &segment), Ok(()));
        assert_eq!(link.generation(), Some(Generation(2)));
    }

    #[test]
    fn the_end_of_an_old_generation_does_not_touch_the_new_one() {
        let (link, segment) = (Link::new(Rank::SOLO), segment());
        segment.reform().unwrap();
        join(&link, &segment).unwrap();
        link.lifeline().abort(1);
        assert_eq!(segment.abort(segment.generation()).cause(), None);
        link.lifeline().abort(2);
        assert_eq!(segment.abort(segment.generation()).cause(), Some(GroupError::Aborted));
    }

    #[test]
    fn nothing_begins_after_the_end() {
        let (link, segment) = (Link::new(Rank::SOLO), segment());
        link.lifeline().end();
        assert_eq!(join(&link, &segment), Err(GroupError::Aborted));
    }

    #[test]
    fn hosts_that_were_told_to_stop_do_not_connect() {
        let link = Link::new(Rank::SOLO);
        link.lifeline().abort(3);
        let connected = link.connect(Generation(3), |abort| Err::<Mesh, _>(abort.cause()));
        assert_eq!(connected, Err(Some(MeshError::Aborted)));
        assert_eq!(link.generation(), None);
        let told = link.connect(Generation(4), |abort| {
            link.lifeline().abort(4);
            Err::<Mesh, _>(abort.cause())
        });
        assert_eq!(told, Err(Some(MeshError::Aborted)));
    }

    #[test]
    fn only_a_world_of_one_is_complete_without_a_group() {
        let two = WorldSize::new(2).and_then(|world| world.rank(1)).unwrap();
        assert!(Link::new(Rank::SOLO).is_complete() && !Link::new(two).is_complete());
    }
}
