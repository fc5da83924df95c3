//! `Batch`: which of the runs that wait go into one step.
//!
//! The first run decides about the layers. Others follow as far as the step's limits allow: the first one of every client, then
//! the second ones, and so on. Clients that were not part of the last step come first. So a client waits for one run of each
//! other client, however many they send. A plan has decode rows before prefill rows, so the step lists them in that order.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Instant;

use engine::{Capacity, Phase};
use tokio::sync::oneshot;
use types::LayerRange;

use super::backlog::BacklogPlace;
use super::thread::SessionKey;
use super::{BlockRows, BlockStates, Client, RunError};

/// Rows that wait for a step. They were checked.
#[derive(Debug)]
pub(super) struct WaitingRun {
    pub client: Client,
    pub session: SessionKey,
    pub layers: LayerRange,
    pub rows: BlockRows,
    pub count: usize,
    pub reply: oneshot::Sender<Result<BlockStates, RunError>>,
    pub since: Instant,
    pub _place: BacklogPlace,
}

/// Takes the runs of the next step out of `waiting`, in the order of the plan. Runs of one session keep their order. `served`: the
/// clients of the last step, which become those of this one.
pub(super) fn take_batch(
    waiting: &mut VecDeque<WaitingRun>,
    capacity: &Capacity,
    served: &mut HashSet<Client>,
) -> Vec<WaitingRun> {
    let mut turns: HashMap<Client, usize> = HashMap::new();
    let turn = |run: WaitingRun| {
        let turn = turns.entry(run.client).or_default();
        *turn += 1;
        (*turn, run)
    };
    let mut runs: Vec<(usize, WaitingRun)> = waiting.drain(..).map(turn).collect();
    // The sort is stable.
    runs.sort_by_key(|(turn, run)| (*turn, served.contains(&run.client)));
    let Some(layers) = runs.first().map(|(_, run)| run.layers) else { return Vec::new() };
    let (mut rows, mut pages) = (0, 0);
    let mut batch: Vec<WaitingRun> = Vec::new();
    let mut left: Vec<WaitingRun> = Vec::new();
    for (_, run) in runs {
        let run_pages = capacity.pages(run.rows.position + run.count);
        let fits = batch.len() < capacity.sequences_max
            && rows + run.count <= capacity.rows_max
            && pages + run_pages <= capacity.step_pages_max;
        let is_free = |other: &WaitingRun| other.session != run.session;
        if fits && run.layers == layers && batch.iter().chain(&left).all(is_free) {
            (rows, pages) = (rows + run.count, pages + run_pages);
            batch.push(run);
        } else {
            left.push(run);
        }
    }
    *served = batch.iter().map(|run| run.client).collect();
    waiting.extend(left);
    batch.sort_by_key(|run| run.rows.phase == Phase::Prefill);
    batch
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::super::BlockLimits;
    use super::super::backlog::Backlog;
    use super::*;

    fn capacity() -> Capacity {
        Capacity {
            vocab: 1,
            positions_max: 100,
            rows_max: 8,
            sequences_max: 8,
            logit_rows_max: 8,
            step_pages_max: 64,
            page_tokens: 32,
            pages_total: 64,
            pages_free: 64,
            pages_cached: 0,
        }
    }

    fn waiting(client: u8, session: u64, layers: (u32, u32), count: usize) -> WaitingRun {
        let rows = BlockRows { position: 0, phase: Phase::Decode, activations: Vec::new(), state_rows: 0 };
        let client = Client::Address(IpAddr::from([127, 0, 0, client]));
        WaitingRun {
            client,
            session: SessionKey::for_test(session),
            layers: LayerRange::new(layers.0, layers.1).unwrap(),
            rows,
            count,
            reply: oneshot::channel().0,
            since: Instant::now(),
            _place: Backlog::new(BlockLimits::default()).enter(client, 0).unwrap(),
        }
    }

    fn sessions(batch: &[WaitingRun]) -> Vec<SessionKey> {
        batch.iter().map(|run| run.session).collect()
    }

    fn keys(numbers: &[u64]) -> Vec<SessionKey> {
        numbers.iter().map(|number| SessionKey::for_test(*number)).collect()
    }

    #[test]
    fn a_client_waits_for_one_run_of_another_however_many_those_are() {
        let mut queue: VecDeque<_> = (0..50).map(|session| waiting(1, session, (0, 2), 8)).collect();
        let mut served = HashSet::new();
        queue.push_back(waiting(2, 100, (0, 2), 1));
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[0]));
        // They go on together, as far as there is room.
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[100]));
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[1]));
        // One that comes while a run of the other is in a step is the next one too.
        queue.push_back(waiting(2, 101, (0, 2), 1));
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[101]));
        assert_eq!(queue.len(), 48);
    }

    #[test]
    fn other_layers_have_their_turn_while_many_runs_wait() {
        let mut queue: VecDeque<_> = (0..20).map(|session| waiting(1, session, (0, 2), 4)).collect();
        let mut served = HashSet::new();
        queue.push_back(waiting(2, 100, (1, 2), 1));
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[0, 1]));
        queue.push_back(waiting(3, 200, (0, 2), 4));
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[100]));
        // The first of each client, then the second ones.
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[200, 2]));
    }

    #[test]
    fn runs_of_one_session_keep_their_order_and_are_not_in_one_step() {
        let mut queue: VecDeque<_> = [1, 1, 2, 1].into_iter().map(|session| waiting(1, session, (0, 2), 1)).collect();
        let mut served = HashSet::new();
        let positions = |queue: &VecDeque<WaitingRun>| queue.iter().map(|run| run.count).collect::<Vec<_>>();
        queue.iter_mut().zip(1..).for_each(|(run, count)| run.count = count);
        assert_eq!(sessions(&take_batch(&mut queue, &capacity(), &mut served)), keys(&[1, 2]));
        assert_eq!(positions(&queue), [2, 4]);
        assert_eq!(
            take_batch(&mut queue, &capacity(), &mut served).iter().map(|run| run.count).collect::<Vec<_>>(),
            [2]
        );
    }
}
