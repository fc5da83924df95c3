//! `KeptRows`: the activations before a layer, which the client keeps for a replay. The first of them may be gone.

use std::collections::BTreeMap;
use std::ops::Range;

use engine::Phase;

use super::{SessionState, SpanId};

/// `[rows, hidden]`, of which the first rows may have been dropped to save memory.
#[derive(Debug)]
pub(super) struct KeptRows {
    hidden: usize,
    /// The first row that is there.
    first: usize,
    values: Vec<f32>,
}

impl KeptRows {
    pub fn new(hidden: usize) -> Self {
        Self { hidden, first: 0, values: Vec::new() }
    }

    /// With those that were dropped.
    pub fn len(&self) -> usize {
        self.first + self.values.len() / self.hidden
    }

    /// The first row that is there.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Rows, if all of them are there.
    pub fn get(&self, rows: Range<usize>) -> Option<&[f32]> {
        let start = rows.start.checked_sub(self.first)?;
        self.values.get(start * self.hidden..(rows.end.checked_sub(self.first)?) * self.hidden)
    }

    /// Memory grows by a quarter, not by half of what is needed, as a vector's does.
    pub fn append(&mut self, rows: &[f32]) {
        if self.values.capacity() - self.values.len() < rows.len() {
            self.values.reserve_exact(rows.len().max(self.values.len() / 4));
        }
        self.values.extend_from_slice(rows);
    }

    pub fn truncate(&mut self, rows: usize) {
        self.values.truncate(rows.saturating_sub(self.first) * self.hidden);
        self.first = self.first.min(rows);
    }

    /// Drops the rows before one, and gives their memory back.
    pub fn drop_before(&mut self, row: usize) {
        let count = row.min(self.len()).saturating_sub(self.first);
        self.values.drain(..count * self.hidden);
        self.values.shrink_to_fit();
        self.first += count;
    }

    pub fn bytes(&self) -> usize {
        self.values.capacity() * size_of::<f32>()
    }
}

impl SessionState {
    /// The first rows before a layer, if the client has them, and their phases.
    pub fn rows_before_layer(&self, layer: usize, rows: usize) -> Option<(&[f32], &[Phase])> {
        Some((self.inputs.get(&layer)?.get(0..rows)?, self.phases.get(..rows)?))
    }

    /// What a span's own peer has returned of the first rows: the positions, in order, and the rows.
    pub fn returned_by(&self, id: SpanId, rows: usize) -> Option<(Vec<usize>, Vec<f32>)> {
        let index = self.index(id)?;
        let span = &self.spans[index];
        if index + 1 == self.spans.len() {
            let outputs = self.outputs.as_ref()?.range(..rows);
            let (positions, rows): (Vec<_>, Vec<_>) =
                outputs.map(|(position, row)| (*position, row.as_slice())).unzip();
            return Some((positions, rows.concat()));
        }
        let own = span.own_from.min(rows)..rows;
        let values = self.inputs.get(&span.new.layers.end())?.get(own.clone())?;
        Some((own.collect(), values.to_vec()))
    }

    /// Memory of what is kept for replays and for checks.
    pub fn kept_bytes(&self) -> usize {
        let outputs = self.outputs.as_ref().map_or(0, |rows| rows.len() * self.hidden * size_of::<f32>());
        self.inputs.values().map(KeptRows::bytes).sum::<usize>() + outputs
    }

    /// Drops rows that all peers have and that no reply is due about.
    pub fn drop_kept(&mut self) {
        for span in &self.spans {
            let needed = span.due.values().map(|due| due.position).min().unwrap_or(span.sent).min(span.sent);
            if let Some(rows) = self.inputs.get_mut(&span.new.layers.start()) {
                rows.drop_before(needed);
            }
        }
        self.outputs.iter_mut().for_each(BTreeMap::clear);
    }

    /// Whether a span that begins with this layer can be replaced.
    pub fn can_replay(&self, layer: usize) -> bool {
        self.inputs.get(&layer).is_none_or(|rows| rows.first() == 0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn rows_that_were_dropped_count_and_are_not_there() {
        let mut rows = KeptRows::new(2);
        rows.append(&[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
        assert_eq!(rows.get(1..2).unwrap(), [1.0, 1.0]);
        rows.drop_before(2);
        assert_eq!((rows.len(), rows.first()), (3, 2));
        assert_eq!((rows.get(1..3), rows.get(2..3)), (None, Some(&[2.0, 2.0][..])));
        assert_eq!(rows.bytes(), 8);
        rows.append(&[3.0, 3.0]);
        assert_eq!(rows.get(2..4).unwrap(), [2.0, 2.0, 3.0, 3.0]);
        rows.truncate(1);
        assert_eq!((rows.len(), rows.first()), (1, 1));
        rows.append(&[1.0, 1.0]);
        assert_eq!((rows.len(), rows.get(1..2)), (2, Some(&[1.0, 1.0][..])));
        rows.drop_before(100);
        assert_eq!((rows.len(), rows.bytes()), (2, 0));
    }
}
