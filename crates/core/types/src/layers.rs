//! Ranges of decoder layers.

use std::fmt;

/// A non-empty, half-open range of decoder layers, which one stage or peer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerRange {
    start: u32,
    end: u32,
}

impl LayerRange {
    pub fn new(start: u32, end: u32) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    pub fn start(self) -> usize {
        self.start as usize
    }

    pub fn end(self) -> usize {
        self.end as usize
    }

    /// The number of layers; never zero.
    pub fn count(self) -> usize {
        (self.end - self.start) as usize
    }

    pub fn iter(self) -> impl ExactSizeIterator<Item = usize> {
        self.start()..self.end()
    }

    /// Whether all layers of `part` are among these.
    pub fn contains(self, part: Self) -> bool {
        self.start <= part.start && part.end <= self.end
    }

    /// These layers, counted from the first of `all`. `None` if they are not among them.
    pub fn position_in(self, all: Self) -> Option<Self> {
        all.contains(self).then(|| Self { start: self.start - all.start, end: self.end - all.start })
    }

    /// Those of these layers that have this position: see [`LayerRange::position_in`].
    pub fn at(self, position: Self) -> Option<Self> {
        let [start, end] = [position.start, position.end].map(|layer| self.start.checked_add(layer));
        Self::new(start?, end?).filter(|found| self.contains(*found))
    }

    /// True when `next` can follow `self` in a chain without a gap or an overlap.
    pub fn meets(self, next: Self) -> bool {
        self.end == next.start
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_or_reversed_range_does_not_exist() {
        assert_eq!(LayerRange::new(3, 3), None);
        assert_eq!(LayerRange::new(4, 3), None);
    }

    #[test]
    fn a_range_contains_its_parts_and_itself() {
        let range = |a, b| LayerRange::new(a, b).unwrap();
        for part in [range(2, 6), range(2, 3), range(5, 6), range(3, 5)] {
            assert!(range(2, 6).contains(part), "{part}");
        }
        for other in [range(1, 3), range(5, 7), range(1, 7), range(0, 2), range(6, 7)] {
            assert!(!range(2, 6).contains(other), "{other}");
        }
    }

    #[test]
    fn a_position_is_counted_from_the_first_layer() {
        let range = |a, b| LayerRange::new(a, b).unwrap();
        for (part, position) in [(range(2, 6), range(0, 4)), (range(3, 4), range(1, 2))] {
            assert_eq!((part.position_in(range(2, 6)), range(2, 6).at(position)), (Some(position), Some(part)));
        }
        assert_eq!((range(1, 3).position_in(range(2, 6)), range(2, 6).at(range(3, 5))), (None, None));
        assert_eq!(range(2, 6).at(range(1, u32::MAX)), None);
    }

    #[test]
    fn a_chain_with_a_gap_is_refused() {
        let range = |a, b| LayerRange::new(a, b).unwrap();
        assert!(range(0, 4).meets(range(4, 5)));
        assert!(!range(0, 4).meets(range(5, 6)));
        assert!(!range(0, 4).meets(range(3, 6)));
    }
}
