//! `Batch`: which of the runs that wait go into one step.
//!
//! The oldest run goes first and decides about the layers. Others follow in their order as far as the step's limits allow. A
//! plan has decode rows before prefill rows, so the step lists them in that order.

use std::collections::VecDeque;
use std::time::Instant;

use engine::{Capacity, Phase};
use tokio::sync::oneshot;
use types::LayerRange;

use super::thread::SessionKey;
use super::{BlockRows, BlockStates, RunError};

/// Rows that wait for a step. They were checked.
#[derive(Debug)]
pub(super) struct WaitingRun {
    pub session: SessionKey,
    pub layers: LayerRange,
    pub rows: BlockRows,
    pub count: usize,
    pub reply: oneshot::Sender<Result<BlockStates, RunError>>,
    pub since: Instant,
}

/// Takes the runs of the next step out of `waiting`, in the order of the plan. Runs of one session keep their order.
pub(super) fn take_batch(waiting: &mut VecDeque<WaitingRun>, capacity: &Capacity) -> Vec<WaitingRun> {
    let Some(layers) = waiting.front().map(|run| run.layers) else { return Vec::new() };
    let (mut rows, mut pages) = (0, 0);
    let mut batch: Vec<WaitingRun> = Vec::new();
    let mut left = VecDeque::new();
    for run in waiting.drain(..) {
        let run_pages = capacity.pages(run.rows.position + run.count);
        let fits = batch.len() < capacity.sequences_max
            && rows + run.count <= capacity.rows_max
            && pages + run_pages <= capacity.step_pages_max;
        let is_free = |other: &WaitingRun| other.session != run.session;
        if fits && run.layers == layers && batch.iter().chain(&left).all(is_free) {
            (rows, pages) = (rows + run.count, pages + run_pages);
            batch.push(run);
        } else {
            left.push_back(run);
        }
    }
    *waiting = left;
    // The sort is stable.
    batch.sort_by_key(|run| run.rows.phase == Phase::Prefill);
    batch
}
