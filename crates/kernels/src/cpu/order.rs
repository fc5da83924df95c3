//! Which matrix is multiplied after which, learned from step to step, so that threads that wait for each other can ask for the
//! weights that they will read next. A wrong guess costs some memory traffic at a moment when there would be none.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use super::pool::Panels;

/// What a matrix knows about the order, for each worker.
pub(crate) struct Place {
    /// Where the worker begins to read the matrix.
    panels: Box<[Panels]>,
    /// The same of the matrix that came after it the last time.
    next: Arc<[Panels<AtomicUsize>]>,
}

impl Place {
    pub(crate) fn new(panels: impl Iterator<Item = Panels>) -> Self {
        let panels: Box<[Panels]> = panels.collect();
        let next = panels.iter().map(|_| Panels::default()).collect();
        Self { panels, next }
    }

    /// What is read here has moved.
    pub(crate) fn set(&mut self, panels: impl Iterator<Item = Panels>) {
        for (here, panels) in self.panels.iter_mut().zip(panels) {
            *here = panels;
        }
    }

    /// Where workers will probably begin to read after this matrix.
    pub(crate) fn next(&self) -> &[Panels<AtomicUsize>] {
        &self.next
    }
}

/// The order in which a backend multiplies.
#[derive(Default)]
pub(crate) struct Order {
    /// [`Place::next`] of the last matrix.
    last: Mutex<Option<Arc<[Panels<AtomicUsize>]>>>,
}

impl Order {
    /// The matrix at `place` is about to be multiplied.
    pub(crate) fn reach(&self, place: &Place) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(&place.next));
        for (next, panels) in last.iter().flat_map(|last| last.iter()).zip(&place.panels) {
            next.set(*panels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_learns_which_one_came_after_it() {
        let order = Order::default();
        let panels = |start| Panels { start, stride: 10 * start };
        let places = [[1, 2], [3, 4], [5, 6]].map(|starts| Place::new(starts.into_iter().map(panels)));
        let next = |place: &Place| place.next().iter().map(|next| next.get().start).collect::<Vec<_>>();
        for place in [0, 1, 0] {
            order.reach(&places[place]);
        }
        assert_eq!([next(&places[0]), next(&places[1]), next(&places[2])], [[3, 4], [1, 2], [0, 0]]);
        order.reach(&places[2]);
        assert_eq!(next(&places[0]), [5, 6]);
    }
}
