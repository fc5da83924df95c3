//! What the collectives compute, when nothing fails.

use collectives::tcp::{Encoding, TcpComm, TcpCommOptions};
use collectives::{CommError, Communicator as _};
use types::{Rank, WorldSize};

use crate::group::{OPTIONS, all};
use testing::shared_memory_group::{self, bits, numbers, sum};
use testing::watchdog::watched;

/// Enough elements for three ranks to sum in shards.
const SHARED: usize = 20_011;
/// More than the sockets' buffers hold.
const LARGE: usize = 1 << 20;

const Q8: TcpCommOptions = TcpCommOptions { encoding: Encoding::Q8, ..OPTIONS };

#[test]
fn every_rank_gets_the_sum_of_shared_memory_bit_for_bit() {
    watched(|| {
        for size in 1..=4 {
            let lengths = [0, 1, 7, 4095, 4096, 4097, 8192, 8193, SHARED];
            let sums = shared_memory_group::Group::new(size, SHARED).all(|comm| {
                lengths.map(|len| {
                    let mut values = numbers(comm.rank(), len, len);
                    comm.all_reduce(&mut values).unwrap();
                    bits(&values)
                })
            });
            let found = all(size, OPTIONS, |comm| {
                lengths.map(|len| {
                    let mut values = numbers(comm.rank(), len, len);
                    comm.all_reduce(&mut values).unwrap();
                    assert_eq!(bits(&values), bits(&sum(comm.rank().world().ranks(), len, len)), "{len} elements");
                    bits(&values)
                })
            });
            assert_eq!(found, sums);
        }
    });
}

#[test]
fn messages_larger_than_all_buffers_do_not_lock() {
    watched(|| {
        for size in 2..=4 {
            all(size, OPTIONS, |comm| {
                let mut values = numbers(comm.rank(), 0, LARGE);
                comm.all_reduce(&mut values).unwrap();
                assert_eq!(bits(&values), bits(&sum(comm.rank().world().ranks(), 0, LARGE)));
                check_columns(comm, 1, LARGE);
            });
        }
    });
}

/// Gathers columns on rank 0 and compares each with its owner's values.
fn check_columns(comm: &mut TcpComm, rows: usize, cols: usize) {
    let part = |rank: Rank| numbers(rank, 0, rows * rank.shard(cols).len());
    let (own, is_first) = (part(comm.rank()), comm.rank().index() == 0);
    let mut all = vec![f32::NAN; if is_first { rows * cols } else { 0 }];
    comm.gather_columns([rows, cols], &own, is_first.then_some(&mut all[..])).unwrap();
    for owner in comm.rank().world().ranks().filter(|_| is_first) {
        let (share, part) = (owner.shard(cols), part(owner));
        for row in 0..rows {
            let found = &all[row * cols..][share.clone()];
            assert_eq!(bits(found), bits(&part[row * share.len()..][..share.len()]), "row {row} of {owner}");
        }
    }
}

#[test]
fn the_first_rank_gets_the_columns_of_all() {
    watched(|| {
        for size in 1..=4 {
            for (rows, cols) in [(1, 1), (3, 7), (2, 101), (0, 3)] {
                all(size, OPTIONS, |comm| {
                    check_columns(comm, rows, cols);
                    comm.all_reduce(&mut [1.0]).unwrap();
                });
            }
        }
    });
}

#[test]
fn thousands_of_operations_in_a_row_do_not_mix() {
    watched(|| {
        all(3, OPTIONS, |comm| {
            let world = comm.rank().world();
            for op in 0..2000 {
                let len = if op % 500 == 0 { SHARED } else { 1 + op % 40 };
                let mut values = numbers(comm.rank(), op, len);
                if op % 2 == 0 {
                    comm.all_reduce(&mut values).unwrap();
                    assert_eq!(bits(&values), bits(&sum(world.ranks(), op, len)), "operation {op}");
                } else {
                    check_columns(comm, 1, len);
                }
            }
        });
    });
}

#[test]
fn eight_bits_give_all_ranks_the_same_sum_near_the_exact_one() {
    watched(|| {
        for size in 2..=4 {
            for len in [1, 31, 32, 33, 1000, SHARED] {
                let found = all(size, Q8, |comm| {
                    let mut values = numbers(comm.rank(), 0, len);
                    comm.all_reduce(&mut values).unwrap();
                    bits(&values)
                });
                assert!(found.iter().all(|sums| *sums == found[0]), "{size} ranks, {len} elements");
                check_near(size, len, &found[0]);
            }
        }
    });
}

/// The error is at most half a quantisation step for each term, and half a step of the sums.
fn check_near(size: u16, len: usize, found: &[u32]) {
    let world = WorldSize::new(size).unwrap();
    let terms: Vec<_> = world.ranks().map(|rank| numbers(rank, 0, len)).collect();
    let exact = sum(world.ranks(), 0, len);
    let largest = |values: &[f32], at: usize| {
        let block = at / 32 * 32..len.min(at / 32 * 32 + 32);
        values[block].iter().fold(0.0_f32, |largest, value| largest.max(value.abs()))
    };
    for (at, (found, exact_sum)) in found.iter().zip(&exact).enumerate() {
        let of_terms: f32 = terms.iter().map(|terms| largest(terms, at) / 254.0).sum();
        // The sums are of rounded terms.
        let of_sums = (largest(&exact, at) + of_terms) / 254.0;
        let apart = (f32::from_bits(*found) - exact_sum).abs();
        assert!(apart <= (of_terms + of_sums) * 1.001, "{apart} at {at} of {len}, {size} ranks");
    }
}

#[test]
fn eight_bits_give_the_same_sum_whichever_way_it_is_taken() {
    watched(|| {
        // The first 4096 alone are summed whole by every rank; as part of all elements they are summed in shards.
        let head = 4096;
        all(4, Q8, |comm| {
            let mut many = numbers(comm.rank(), 0, SHARED);
            let mut few = many[..head].to_vec();
            comm.all_reduce(&mut many).unwrap();
            comm.all_reduce(&mut few).unwrap();
            assert_eq!(bits(&many[..head]), bits(&few));
        });
    });
}

#[test]
fn what_is_gathered_is_never_rounded() {
    watched(|| drop(all(2, Q8, |comm| check_columns(comm, 1, 100))));
}

#[test]
fn what_exceeds_the_limit_is_refused_and_the_group_goes_on() {
    watched(|| {
        let options = TcpCommOptions { elements_max: 8, ..OPTIONS };
        all(2, options, |comm| {
            let refused = Err(CommError::TooLarge { elements: 9, elements_max: 8 });
            assert_eq!(comm.all_reduce(&mut [0.0; 9]), refused);
            assert_eq!(comm.all_reduce(&mut [0.0; 8]), Ok(()));
        });
    });
}
