//! Which matrix is multiplied after which, learned from step to step, so that threads that wait for each other can ask for the
//! weights that they will read next. A wrong guess costs some memory traffic at a moment when there would be none.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use super::pool::{Panels, Pool};

/// What a matrix knows about the order, for each worker.
pub(crate) struct Place(Arc<[Link]>);

struct Link {
    /// Where the worker begins to read the matrix.
    panels: Panels,
    /// The same of the matrix that came after it the last time.
    next: Panels<AtomicUsize>,
}

impl Place {
    pub(crate) fn new(panels: impl Iterator<Item = Panels>) -> Self {
        Self(panels.map(|panels| Link { panels, next: Panels::default() }).collect())
    }
}

/// The order in which a backend multiplies.
#[derive(Default)]
pub(crate) struct Order {
    last: Mutex<Option<Arc<[Link]>>>,
}

impl Order {
    /// The matrix at `place` is about to be multiplied.
    pub(crate) fn reach(&self, place: &Place, pool: &Pool) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(&place.0));
        for (last, link) in last.iter().flat_map(|last| last.iter()).zip(&*place.0) {
            last.next.set(link.panels);
        }
        // Last: workers have looked at these lines, and a lock after it would wait until they are here.
        pool.expect(place.0.iter().map(|link| link.next.get()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_learns_which_one_came_after_it() {
        let (pool, order) = (Pool::new(2).unwrap(), Order::default());
        let panels = |start| Panels { start, stride: 10 * start };
        let places = [[1, 2], [3, 4], [5, 6]].map(|starts| Place::new(starts.into_iter().map(panels)));
        let next = |place: &Place| place.0.iter().map(|link| link.next.get().start).collect::<Vec<_>>();
        for place in [0, 1, 0] {
            order.reach(&places[place], &pool);
        }
        assert_eq!([next(&places[0]), next(&places[1]), next(&places[2])], [[3, 4], [1, 2], [0, 0]]);
        order.reach(&places[2], &pool);
        assert_eq!(next(&places[0]), [5, 6]);
    }
}
