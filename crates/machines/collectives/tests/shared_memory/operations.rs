//! What the collectives compute, when nothing fails.

use collectives::Communicator as _;
use collectives::shared_memory::ShmComm;
use types::WorldSize;

use testing::shared_memory_group::{Group, bits, numbers, sum};
use testing::watchdog::watched;

/// Enough elements for three ranks to sum in shards.
const SHARED: usize = 20_011;

#[test]
fn the_numbers_of_these_tests_show_the_order_of_a_sum() {
    let group = Group::new(3, 1);
    let reversed = [2, 1, 0].map(|index| group.rank(index)).into_iter();
    let (forth, back) = (sum(group.limits.world.ranks(), 0, 100), sum(reversed, 0, 100));
    assert_ne!(bits(&forth), bits(&back));
}

#[test]
fn every_rank_gets_the_sum_in_rank_order_bit_for_bit() {
    watched(|| {
        for size in 1..=4 {
            let group = Group::new(size, SHARED);
            group.all(|comm| {
                for (op, len) in [0, 1, 7, 1023, 1024, 1025, 8192, 8193, SHARED].into_iter().enumerate() {
                    let mut values = numbers(comm.rank(), op, len);
                    comm.all_reduce(&mut values).unwrap();
                    let want = sum(comm.rank().world().ranks(), op, len);
                    assert_eq!(bits(&values), bits(&want), "{len} elements, rank {}", comm.rank());
                }
            });
        }
    });
}

#[test]
fn infinities_and_nan_travel_as_they_are() {
    watched(|| {
        let group = Group::new(2, 4);
        group.all(|comm| {
            let own = comm.rank().index() == 0;
            let mut values = if own { [f32::INFINITY, f32::MAX, -0.0, 1.0] } else { [1.0, f32::MAX, -0.0, f32::NAN] };
            comm.all_reduce(&mut values).unwrap();
            assert_eq!(values[..2], [f32::INFINITY; 2]);
            assert!(values[2].to_bits() == (-0.0_f32).to_bits() && values[3].is_nan());
        });
    });
}

/// The result of [`Communicator::gather_columns`] on rank 0 with the numbers of operation `op`.
fn columns(world: WorldSize, op: usize, rows: usize, cols: usize) -> Vec<f32> {
    let mut whole = vec![f32::NAN; rows * cols];
    for rank in world.ranks() {
        let (share, part) = (rank.shard(cols), numbers(rank, op, rows * rank.shard(cols).len()));
        for row in 0..rows {
            whole[row * cols..][share.clone()].copy_from_slice(&part[row * share.len()..][..share.len()]);
        }
    }
    whole
}

fn check_columns(comm: &mut ShmComm, op: usize, rows: usize, cols: usize) {
    let (rank, part) = (comm.rank(), numbers(comm.rank(), op, rows * comm.rank().shard(cols).len()));
    let mut whole = (rank.index() == 0).then(|| vec![0.0; rows * cols]);
    comm.gather_columns([rows, cols], &part, whole.as_deref_mut()).unwrap();
    if let Some(whole) = whole {
        assert_eq!(bits(&whole), bits(&columns(rank.world(), op, rows, cols)), "{rows}x{cols}, operation {op}");
    }
}

#[test]
fn the_first_rank_gets_the_columns_of_all() {
    watched(|| {
        for size in 1..=4 {
            Group::new(size, 4000).all(|comm| {
                for (op, (rows, cols)) in [(1, 1), (1, 5), (3, 7), (5, 4), (2, 1001)].into_iter().enumerate() {
                    check_columns(comm, op, rows, cols);
                }
            });
        }
    });
}

/// Reduce-scatters rows, negates those that the rank owns, and gathers: every rank must have the negated sums.
fn check_rows(comm: &mut ShmComm, op: usize, rows: usize, cols: usize) {
    let mut values = numbers(comm.rank(), op, rows * cols);
    let own = comm.reduce_scatter_rows(cols, &mut values).unwrap();
    let mut negated = vec![f32::NAN; rows * cols];
    for element in own.start * cols..own.end * cols {
        negated[element] = -values[element];
    }
    comm.all_gather_rows(cols, &mut negated).unwrap();
    let want: Vec<f32> = sum(comm.rank().world().ranks(), op, rows * cols).into_iter().map(|sum| -sum).collect();
    assert_eq!(bits(&negated), bits(&want), "{rows}x{cols}, operation {op}, rank {}", comm.rank());
}

#[test]
fn rows_are_summed_by_their_owners_and_gathered_by_all() {
    watched(|| {
        for size in 1..=4 {
            Group::new(size, 1 << 17).all(|comm| {
                // Too few elements or rows to be scattered, and enough; rows that do not divide evenly.
                for (op, (rows, cols)) in
                    [(1, 7), (100, 8), (1, 1 << 15), (64, 512), (67, 1001), (3, 1 << 15)].into_iter().enumerate()
                {
                    check_rows(comm, op, rows, cols);
                }
            });
        }
    });
}

#[test]
fn thousands_of_operations_in_a_row_do_not_mix() {
    watched(|| {
        let group = Group::new(3, 1 << 16);
        group.all(|comm| {
            let world = comm.rank().world();
            for op in 0..3000 {
                let len = if op % 500 == 0 { SHARED } else { 1 + op % 40 };
                let mut values = numbers(comm.rank(), op, len);
                match op % 3 {
                    0 => {
                        comm.all_reduce(&mut values).unwrap();
                        assert_eq!(bits(&values), bits(&sum(world.ranks(), op, len)), "operation {op}");
                    }
                    1 => check_columns(comm, op, 1, len),
                    _ => {
                        check_rows(comm, op, if op % 500 == 2 { 64 } else { 3 }, if op % 500 == 2 { 512 } else { len })
                    }
                }
            }
        });
    });
}
