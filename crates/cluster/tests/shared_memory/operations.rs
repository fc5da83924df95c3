//! What the collectives compute, when nothing fails.

use std::ops::Range;

use types::Rank;

use crate::group::{Group, bits, numbers, sum, watched};

/// Enough that three ranks share the summing.
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
            group.all(|seat| {
                for (op, len) in [0, 1, 7, 1023, 1024, 1025, 8192, 8193, SHARED].into_iter().enumerate() {
                    let mut values = numbers(seat.rank(), op, len);
                    seat.all_reduce(&mut values).unwrap();
                    let want = sum(seat.rank().world().ranks(), op, len);
                    assert_eq!(bits(&values), bits(&want), "{len} elements, rank {}", seat.rank());
                }
            });
        }
    });
}

#[test]
fn infinities_and_nan_travel_as_they_are() {
    watched(|| {
        let group = Group::new(2, 4);
        group.all(|seat| {
            let own = seat.rank().index() == 0;
            let mut values = if own { [f32::INFINITY, f32::MAX, -0.0, 1.0] } else { [1.0, f32::MAX, -0.0, f32::NAN] };
            seat.all_reduce(&mut values).unwrap();
            assert_eq!(values[..2], [f32::INFINITY; 2]);
            assert!(values[2].to_bits() == (-0.0_f32).to_bits() && values[3].is_nan());
        });
    });
}

/// What all ranks together have filled: each column comes from the rank whose share it is in.
fn check_gather(size: u16, rows: usize, cols: usize, share: impl Fn(Rank) -> Range<usize> + Sync) {
    let group = Group::new(size, rows * cols);
    let mut want = vec![f32::NAN; rows * cols];
    for rank in group.limits.world.ranks() {
        let numbers = numbers(rank, 0, rows * cols);
        for index in (0..rows * cols).filter(|index| share(rank).contains(&(index % cols))) {
            want[index] = numbers[index];
        }
    }
    assert!(want.iter().all(|value| !value.is_nan()), "the shares cover everything");
    group.all(|seat| {
        let mut values = numbers(seat.rank(), 0, rows * cols);
        for index in (0..rows * cols).filter(|index| !share(seat.rank()).contains(&(index % cols))) {
            values[index] = f32::NAN;
        }
        seat.all_gather(cols, &share, &mut values).unwrap();
        assert_eq!(bits(&values), bits(&want), "{rows}x{cols}, rank {}", seat.rank());
    });
}

#[test]
fn every_rank_gets_the_columns_of_all() {
    watched(|| {
        for size in 1..=4 {
            for (rows, cols) in [(1, 1), (1, 5), (3, 7), (5, 4), (2, 1001)] {
                check_gather(size, rows, cols, |rank| rank.share(cols));
            }
        }
    });
}

#[test]
fn shares_of_columns_may_be_of_any_lengths() {
    watched(|| check_gather(3, 4, 9, |rank| [0..1, 1..1, 1..9][rank.index()].clone()));
}

#[test]
fn every_rank_gets_what_the_root_has() {
    watched(|| {
        for size in 1..=4 {
            let group = Group::new(size, 77);
            group.all(|seat| {
                for root in seat.rank().world().ranks() {
                    let mut values = numbers(seat.rank(), root.index(), 77);
                    seat.broadcast(root, &mut values).unwrap();
                    assert_eq!(bits(&values), bits(&numbers(root, root.index(), 77)));
                }
            });
        }
    });
}

#[test]
fn thousands_of_operations_in_a_row_do_not_mix() {
    watched(|| {
        let group = Group::new(3, SHARED);
        group.all(|seat| {
            let world = seat.rank().world();
            for op in 0..3000 {
                let len = if op % 500 == 0 { SHARED } else { 1 + op % 40 };
                let mut values = numbers(seat.rank(), op, len);
                match op % 3 {
                    0 => {
                        seat.all_reduce(&mut values).unwrap();
                        assert_eq!(bits(&values), bits(&sum(world.ranks(), op, len)), "operation {op}");
                    }
                    1 => {
                        seat.all_gather(len, |rank| rank.share(len), &mut values).unwrap();
                        for rank in world.ranks() {
                            let share = rank.share(len);
                            assert_eq!(bits(&values[share.clone()]), bits(&numbers(rank, op, len)[share]));
                        }
                    }
                    _ => {
                        let root = world.rank(op as u16 % 3).unwrap();
                        seat.broadcast(root, &mut values).unwrap();
                        assert_eq!(bits(&values), bits(&numbers(root, op, len)), "operation {op}");
                    }
                }
            }
        });
    });
}
