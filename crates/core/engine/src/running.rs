//! `RunningSequences`: the sequences that hold a session, in the order of admission, indexed by session.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use types::SessionId;

use crate::sequence::Sequence;

/// Dereferences to the sequences, oldest first. A sequence in the list keeps its session and its position; only `push`,
/// `pop`, `remove` and `clear` change these.
#[derive(Default)]
pub(crate) struct RunningSequences {
    sequences: Vec<Sequence>,
    /// Where each session's sequence is in `sequences`.
    positions: HashMap<SessionId, usize>,
}

impl RunningSequences {
    /// Adds the youngest sequence.
    pub fn push(&mut self, sequence: Sequence) {
        let before = self.positions.insert(sequence.session(), self.sequences.len());
        assert!(before.is_none(), "two sequences have one session");
        self.sequences.push(sequence);
    }

    /// Removes the youngest sequence.
    pub fn pop(&mut self) -> Option<Sequence> {
        let sequence = self.sequences.pop()?;
        self.positions.remove(&sequence.session());
        Some(sequence)
    }

    /// Removes the sequence at `position`. Those after it move down by one.
    pub fn remove(&mut self, position: usize) -> Sequence {
        let sequence = self.sequences.remove(position);
        self.positions.remove(&sequence.session());
        for (position, later) in self.sequences.iter().enumerate().skip(position) {
            self.positions.insert(later.session(), position);
        }
        sequence
    }

    pub fn clear(&mut self) {
        self.sequences.clear();
        self.positions.clear();
    }

    pub fn position_of(&self, session: SessionId) -> Option<usize> {
        self.positions.get(&session).copied()
    }
}

impl Deref for RunningSequences {
    type Target = [Sequence];

    fn deref(&self) -> &[Sequence] {
        &self.sequences
    }
}

impl DerefMut for RunningSequences {
    fn deref_mut(&mut self) -> &mut [Sequence] {
        &mut self.sequences
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use types::TokenId;

    use super::*;
    use crate::executor::{Capacity, OpenedSession};
    use crate::request::{Request, RequestId};

    const CAPACITY: Capacity = Capacity {
        vocab: 10,
        positions_max: 64,
        rows_max: 8,
        sequences_max: 8,
        logit_rows_max: 8,
        step_pages_max: 8,
        page_tokens: 32,
        pages_total: 8,
        pages_free: 8,
        pages_cached: 0,
    };

    fn sequence(id: u64) -> Sequence {
        let now = Instant::now();
        let request = Request::greedy(vec![TokenId(1)], 1);
        let mut sequence = Sequence::new(RequestId(id), request, &CAPACITY, false, now);
        sequence.admit(OpenedSession { session: SessionId(100 + id), computed: 0 }, now);
        sequence
    }

    fn check(running: &RunningSequences, want: &[u64]) {
        assert_eq!(running.iter().map(|sequence| sequence.id.0).collect::<Vec<_>>(), want);
        for id in 0..6 {
            let position = want.iter().position(|&other| other == id);
            assert_eq!(running.position_of(SessionId(100 + id)), position, "{id} of {want:?}");
        }
    }

    #[test]
    fn sessions_find_their_sequences_when_others_have_been_removed() {
        let mut running = RunningSequences::default();
        (0..6).for_each(|id| running.push(sequence(id)));
        check(&running, &[0, 1, 2, 3, 4, 5]);
        for (position, left) in [(2, &[0, 1, 3, 4, 5][..]), (0, &[1, 3, 4, 5]), (3, &[1, 3, 4])] {
            running.remove(position);
            check(&running, left);
        }
        assert_eq!(running.pop().map(|sequence| sequence.id.0), Some(4));
        check(&running, &[1, 3]);
        running.push(sequence(2));
        check(&running, &[1, 3, 2]);
        running.clear();
        check(&running, &[]);
        assert!(running.pop().is_none());
    }
}
