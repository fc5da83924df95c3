//! `WaitingQueue`: the sequences that wait to run, and which of them is next.
//!
//! Each tenant has a queue of its own. The next sequence is one of the tenant that has been served the fewest tokens, so
//! that a tenant with many or long requests does not keep the others waiting (virtual token counters: Sheng and others,
//! Fairness in serving large language models, 2024). A tenant that returns starts at the lowest count of those present:
//! idle time earns it no credit.

use std::collections::VecDeque;

use crate::request::{RequestId, TenantId};
use crate::sequence::Sequence;

/// Sequences of one tenant that are considered for admission at once.
const SCAN_MAX: usize = 32;

#[derive(Default)]
pub(crate) struct WaitingQueue {
    /// Tenants with a waiting or running sequence, in the order of arrival.
    tenants: Vec<TenantQueue>,
    waiting: usize,
}

struct TenantQueue {
    tenant: TenantId,
    /// Prompt tokens computed for it and tokens generated for it.
    served: u64,
    running: usize,
    waiting: VecDeque<Sequence>,
}

/// The position of a waiting sequence. Valid until the queue changes.
#[derive(Clone, Copy)]
pub(crate) struct QueuePosition {
    /// In `tenants`.
    tenant: usize,
    /// In the tenant's queue.
    index: usize,
}

impl WaitingQueue {
    pub fn len(&self) -> usize {
        self.waiting
    }

    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.tenants.iter().flat_map(|queue| &queue.waiting)
    }

    /// Adds a new sequence at the end of its tenant's queue.
    pub fn push(&mut self, sequence: Sequence) {
        self.tenant_queue(sequence.tenant).waiting.push_back(sequence);
        self.waiting += 1;
    }

    /// Puts a sequence that ran back at the head of its tenant's queue.
    pub fn requeue(&mut self, sequence: Sequence) {
        let queue = self.tenant_queue(sequence.tenant);
        queue.running -= 1;
        queue.waiting.push_front(sequence);
        self.waiting += 1;
    }

    /// The next sequence that `may_run`.
    pub fn next(&self, may_run: impl Fn(&Sequence) -> bool) -> Option<QueuePosition> {
        let first = |queue: &TenantQueue| queue.waiting.iter().take(SCAN_MAX).position(&may_run);
        let candidates = self.tenants.iter().enumerate().filter_map(|(tenant, queue)| {
            let index = first(queue)?;
            Some((queue.served, QueuePosition { tenant, index }))
        });
        candidates.min_by_key(|&(served, _)| served).map(|(_, position)| position)
    }

    pub fn get(&self, position: QueuePosition) -> &Sequence {
        &self.tenants[position.tenant].waiting[position.index]
    }

    /// Takes a sequence in order to run it. The caller reports its end with [`WaitingQueue::finished`].
    pub fn take(&mut self, position: QueuePosition) -> Sequence {
        self.waiting -= 1;
        let queue = &mut self.tenants[position.tenant];
        queue.running += 1;
        queue.waiting.remove(position.index).expect("a valid position holds a sequence")
    }

    /// Removes a sequence that will not run.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let position = self.tenants.iter().enumerate().find_map(|(tenant, queue)| {
            let index = queue.waiting.iter().position(|sequence| sequence.id == id)?;
            Some(QueuePosition { tenant, index })
        })?;
        let sequence = self.take(position);
        self.finished(sequence.tenant);
        Some(sequence)
    }

    /// A sequence that was taken has ended.
    pub fn finished(&mut self, tenant: TenantId) {
        let index = self.tenants.iter().position(|queue| queue.tenant == tenant);
        let index = index.expect("a tenant with a running sequence has a queue");
        let queue = &mut self.tenants[index];
        queue.running -= 1;
        if queue.running == 0 && queue.waiting.is_empty() {
            self.tenants.remove(index);
        }
    }

    /// Counts tokens that a tenant was served.
    pub fn charge(&mut self, tenant: TenantId, tokens: usize) {
        if let Some(queue) = self.tenants.iter_mut().find(|queue| queue.tenant == tenant) {
            queue.served += tokens as u64;
        }
    }

    /// Removes all tenants and their sequences.
    pub fn clear(&mut self) {
        self.tenants.clear();
        self.waiting = 0;
    }

    fn tenant_queue(&mut self, tenant: TenantId) -> &mut TenantQueue {
        let index = self.tenants.iter().position(|queue| queue.tenant == tenant).unwrap_or_else(|| {
            let served = self.tenants.iter().map(|queue| queue.served).min().unwrap_or(0);
            self.tenants.push(TenantQueue { tenant, served, running: 0, waiting: VecDeque::new() });
            self.tenants.len() - 1
        });
        &mut self.tenants[index]
    }
}
