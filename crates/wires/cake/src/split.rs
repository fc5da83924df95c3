//! How many layers each worker gets where nobody says.

/// The layers of each worker, in proportion to memory; this machine has what is left, which are the first layers. A worker of
/// unknown memory counts as much as this machine. A worker may get none.
pub fn split_by_memory(layers: usize, own: u64, workers: &[Option<u64>]) -> Vec<usize> {
    // A machine that reports nothing must not make the sum zero.
    let own = u128::from(own.max(1));
    let shares = workers.iter().map(|memory| memory.map_or(own, u128::from));
    let total = own + shares.clone().sum::<u128>();
    // The number of layers before the end of a share, rounded, so that the counts add up.
    let before = |memory: u128| ((memory * layers as u128 * 2 + total) / (total * 2)) as usize;
    let mut passed = own;
    let mut counts = Vec::with_capacity(workers.len());
    for share in shares {
        let start = before(passed);
        passed += share;
        counts.push(before(passed) - start);
    }
    counts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shares_are_in_proportion_to_memory() {
        const GB: u64 = 1 << 30;
        assert_eq!(split_by_memory(32, 8 * GB, &[Some(8 * GB), Some(16 * GB)]), [8, 16]);
        assert_eq!(split_by_memory(30, 8 * GB, &[None, None]), [10, 10]);
        assert_eq!(split_by_memory(4, 64 * GB, &[Some(GB)]), [0]);
        assert_eq!(split_by_memory(4, 0, &[Some(GB)]), [4]);
        assert_eq!(split_by_memory(4, 0, &[None]), [2]);
    }

    proptest! {
        #[test]
        fn the_counts_never_exceed_the_layers(layers in 0_usize..5000, own: u64, workers: Vec<Option<u64>>) {
            let counts = split_by_memory(layers, own, &workers);
            prop_assert_eq!(counts.len(), workers.len());
            prop_assert!(counts.iter().sum::<usize>() <= layers);
        }
    }
}
