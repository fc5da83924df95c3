//! `TcpComm` as the collective of a backend.

use collectives::tcp::TcpCommOptions;
use collectives::{Communicator as _, GroupCollective};
use kernels::Backend;
use kernels::cpu::{Buffer, CpuBackend, CpuOptions};
use model::{Collective, CollectiveError};

use crate::group::{Group, OPTIONS};
use testing::shared_memory_group::{bits, numbers, sum};
use testing::watchdog::watched;

const ROWS: usize = 4;
const COLS: usize = 11;

/// Runs `part` as every rank, each with its own collective and backend.
fn all(size: u16, elements_max: usize, part: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, types::Rank) + Sync) {
    let comms = Group::new(size).comms(TcpCommOptions { elements_max, ..OPTIONS });
    std::thread::scope(|scope| {
        let part = &part;
        for comm in comms {
            scope.spawn(move || {
                let (rank, collective) = (comm.rank(), GroupCollective::over(comm));
                let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
                part(&collective, &backend, rank);
            });
        }
    });
}

fn read(backend: &CpuBackend, buffer: &<CpuBackend as Backend>::Buffer, rows: usize) -> Vec<f32> {
    let mut values = vec![0.0; rows * COLS];
    backend.read(buffer, 0..rows, &mut values).unwrap();
    values
}

#[test]
fn the_rows_of_a_buffer_are_summed_in_pieces_of_any_size_and_those_after_them_stay() {
    watched(|| {
        for elements_max in [COLS, 2 * COLS + 1, 100 * COLS] {
            all(3, elements_max, |collective, backend, rank| {
                let before = numbers(rank, 0, ROWS * COLS);
                let mut buffer = backend.buffer(ROWS, COLS).unwrap();
                backend.write(&mut buffer, &before).unwrap();
                collective.all_reduce(backend, 3, &mut buffer).unwrap();
                let after = read(backend, &buffer, ROWS);
                assert_eq!(bits(&after[..3 * COLS]), bits(&sum(rank.world().ranks(), 0, 3 * COLS)));
                assert_eq!(bits(&after[3 * COLS..]), bits(&before[3 * COLS..]));
            });
        }
    });
}

#[test]
fn rows_are_made_from_sums_in_pieces_of_any_size() {
    watched(|| {
        for elements_max in [COLS, 2 * COLS + 1, 100 * COLS] {
            all(3, elements_max, |collective, backend, rank| {
                let [mut from, mut to] = [backend.buffer(ROWS, COLS).unwrap(), backend.buffer(ROWS, COLS).unwrap()];
                backend.write(&mut from, &numbers(rank, 0, ROWS * COLS)).unwrap();
                backend.write(&mut to, &[1.0; ROWS * COLS]).unwrap();
                let mut map = |from: &Buffer, to: &mut Buffer, rows| backend.add(rows, to, from);
                collective.reduce_into(backend, ROWS, &mut from, &mut to, &mut map).unwrap();
                let want: Vec<f32> =
                    sum(rank.world().ranks(), 0, ROWS * COLS).into_iter().map(|value| 1.0 + value).collect();
                assert_eq!(bits(&read(backend, &to, ROWS)), bits(&want));
            });
        }
    });
}

#[test]
fn a_row_beyond_the_limit_is_refused_and_a_rank_that_left_is_named() {
    watched(|| {
        all(2, COLS - 1, |collective, backend, rank| {
            let mut buffer = backend.buffer(1, COLS).unwrap();
            let refused = collective.all_reduce(backend, 1, &mut buffer).unwrap_err();
            assert!(matches!(refused, CollectiveError::Transport(_)), "{refused}");
            if rank.index() == 0 {
                let mut buffer = backend.buffer(1, 1).unwrap();
                let error = collective.all_reduce(backend, 1, &mut buffer).unwrap_err();
                assert!(matches!(error, CollectiveError::Lost(lost) if lost.index() == 1), "{error}");
            }
        });
    });
}
