//! Random worlds, and a long replay: every job gets one result, the right one.

mod world;

use std::time::Duration;

use super::*;
use world::{Faults, WAIT, run_worlds};

#[test]
fn without_faults_every_job_is_done_and_nothing_is_replaced() {
    let [done, discarded, replaced, ..] = run_worlds(Faults::default());
    assert!(done > 1000 && discarded > 50 && replaced == 0, "{done} {discarded} {replaced}");
}

#[test]
fn lost_silent_and_garbled_peers_change_no_result() {
    let all = Faults { lost: 4, silent: 2, garbled: 3, ..Faults::default() };
    for faults in [
        Faults { lost: 5, ..Faults::default() },
        Faults { silent: 3, ..Faults::default() },
        Faults { garbled: 5, ..Faults::default() },
        all,
    ] {
        let [done, _, replaced, ..] = run_worlds(faults);
        assert!(done > 500 && replaced > 50, "{done} {replaced}");
    }
}

#[test]
fn duplicate_unasked_and_overtaking_replies_change_no_result() {
    for faults in [
        Faults { twice: 30, ..Faults::default() },
        Faults { unasked: 30, ..Faults::default() },
        Faults { overtaking: 30, ..Faults::default() },
        Faults { twice: 20, unasked: 20, overtaking: 20, ..Faults::default() },
    ] {
        assert!(run_worlds(faults)[0] > 1000);
    }
}

#[test]
fn rows_that_are_not_passed_on_reach_the_next_peer_by_the_client() {
    for faults in [
        Faults { unlinked: 20, ..Faults::default() },
        Faults { dropped: 20, ..Faults::default() },
        Faults {
            unlinked: 10,
            dropped: 10,
            lost: 3,
            silent: 1,
            garbled: 1,
            twice: 10,
            unasked: 10,
            overtaking: 10,
            logits: 0,
            unkept: 0,
        },
    ] {
        assert!(run_worlds(faults)[0] > 500);
    }
}

#[test]
fn last_spans_that_return_logits_and_those_that_return_states_replace_each_other() {
    for faults in [
        Faults { logits: 100, ..Faults::default() },
        Faults { logits: 50, lost: 5, ..Faults::default() },
        Faults {
            logits: 50,
            unlinked: 10,
            dropped: 10,
            lost: 3,
            silent: 1,
            garbled: 3,
            overtaking: 10,
            ..Faults::default()
        },
    ] {
        let [done, _, _, with_logits, without_states] = run_worlds(faults);
        assert!(done > 500 && with_logits > 100 && without_states > 100, "{done} {with_logits} {without_states}");
    }
}

#[test]
fn a_long_replay_is_sent_in_parts_as_the_peer_answers() {
    let mut state = SessionState::new(0, [1, 1], Encoding::F32);
    let layers = LayerRange::new(0, 2).unwrap();
    let (rows_max, returns_logits, fed_by) = (2, false, None);
    let span =
        |id| NewSpan { id: SpanId(id), layers, rows_max, returns_logits, fed_by, wait: WAIT, wait_per_row: WAIT };
    state.add_job(0, Phase::Prefill, &[1.0; 100], 0, false);
    let sends = |state: &mut SessionState| {
        let sent = state.take_actions().into_iter().filter_map(|action| match action {
            Action::Send { run, .. } => Some(run),
            _ => None,
        });
        sent.collect::<VecDeque<Run>>()
    };
    // The job is done, so that its rows are only needed again.
    state.replace(layers, vec![span(1)], None);
    let run = sends(&mut state).pop_front().unwrap();
    let none = Activations::default();
    let times = (Duration::ZERO, Duration::ZERO);
    let reply = |run: u64| Returned { run, passed_on: None, compute: times.0, queued: times.1, states: none.clone() };
    state.returned(SpanId(1), reply(run.run));
    state.take_actions();
    state.replace(layers, vec![span(2)], None);
    let mut due = sends(&mut state);
    let mut runs = 0;
    while let Some(run) = due.pop_front() {
        runs += 1;
        assert!(due.len() < RUNS_DUE_MAX);
        state.returned(SpanId(2), reply(run.run));
        due.extend(sends(&mut state));
    }
    assert_eq!(runs, 50);
}

#[test]
fn a_session_goes_on_without_what_it_kept_and_is_begun_again_after_a_loss() {
    for faults in [
        Faults { unkept: 20, ..Faults::default() },
        Faults { unkept: 20, lost: 5, ..Faults::default() },
        Faults {
            unkept: 10,
            lost: 3,
            silent: 1,
            garbled: 1,
            unlinked: 10,
            dropped: 10,
            overtaking: 10,
            ..Faults::default()
        },
    ] {
        assert!(run_worlds(faults)[0] > 300);
    }
}

#[test]
fn rows_that_all_peers_have_are_dropped_and_no_others() {
    let mut state = SessionState::new(0, [1, 1], Encoding::F32);
    let layers = |start, end| LayerRange::new(start, end).unwrap();
    let span = |id, layers| {
        let (rows_max, returns_logits, fed_by) = (8, false, None);
        NewSpan { id: SpanId(id), layers, rows_max, returns_logits, fed_by, wait: WAIT, wait_per_row: WAIT }
    };
    state.replace(layers(0, 2), vec![span(1, layers(0, 1)), span(2, layers(1, 2))], None);
    let sent = |state: &mut SessionState| {
        let actions = state.take_actions().into_iter();
        actions.filter_map(|action| if let Action::Send { run, .. } = action { Some(run) } else { None }).next()
    };
    let reply = |run: &Run, rows: usize| {
        let states = Activations { encoding: Encoding::F32, rows, values: vec![1.0; rows] };
        Returned { run: run.run, passed_on: None, compute: Duration::ZERO, queued: Duration::ZERO, states }
    };
    state.add_job(0, Phase::Prefill, &[1.0; 8], 1, false);
    let run = sent(&mut state).unwrap();
    state.drop_kept();
    assert_eq!(state.kept_bytes(), 32, "the reply is due");
    state.returned(SpanId(1), reply(&run, 8));
    let run = sent(&mut state).unwrap();
    state.drop_kept();
    assert_eq!(state.kept_bytes(), 32, "those before the second span");
    assert!(!state.can_replay(0) && state.can_replay(1));
    state.returned(SpanId(2), reply(&run, 1));
    state.drop_kept();
    assert!(state.kept_bytes() == 0 && !state.can_replay(1));
    // The next token is run as before.
    state.take_actions();
    state.add_job(8, Phase::Decode, &[1.0], 1, false);
    let run = sent(&mut state).unwrap();
    assert_eq!((run.position, run.activations.values.len()), (8, 1));
    state.returned(SpanId(1), reply(&run, 1));
    assert_eq!(sent(&mut state).unwrap().position, 8);
    // A new peer cannot have the rows.
    state.replace(layers(1, 2), vec![span(3, layers(1, 2))], None);
    assert!(state.take_actions().contains(&Action::Unreplayable));
}

/// What another peer has returned says nothing about the one that took its place.
#[test]
fn a_peer_answers_for_its_own_rows() {
    let mut state = SessionState::new(0, [1, 1], Encoding::F32);
    state.keep_outputs();
    let layers = |start, end| LayerRange::new(start, end).unwrap();
    let span = |id, layers| {
        let (rows_max, returns_logits, fed_by) = (8, false, None);
        NewSpan { id: SpanId(id), layers, rows_max, returns_logits, fed_by, wait: WAIT, wait_per_row: WAIT }
    };
    state.replace(layers(0, 2), vec![span(1, layers(0, 1)), span(2, layers(1, 2))], None);
    let run = |state: &mut SessionState, job: Option<(usize, usize)>, value: f32| {
        if let Some((position, rows)) = job {
            state.add_job(position, Phase::Decode, &vec![1.0; rows], 1, false);
        }
        loop {
            let sends = state.take_actions().into_iter().filter_map(|action| match action {
                Action::Send { to, run } => Some((to, run)),
                _ => None,
            });
            let sends: Vec<_> = sends.collect();
            if sends.is_empty() {
                return;
            }
            for (to, run) in sends {
                let rows = if run.is_silent {
                    0
                } else if to == SpanId(2) {
                    run.state_rows
                } else {
                    run.activations.rows
                };
                let states = Activations { encoding: Encoding::F32, rows, values: vec![value; rows] };
                let times = (Duration::ZERO, Duration::ZERO);
                let (compute, queued) = times;
                state.returned(to, Returned { run: run.run, passed_on: None, compute, queued, states });
            }
        }
    };
    run(&mut state, Some((0, 3)), 5.0);
    run(&mut state, Some((3, 1)), 5.0);
    assert_eq!(state.returned_by(SpanId(1), 4), Some((vec![0, 1, 2, 3], vec![5.0; 4])));
    assert_eq!(state.returned_by(SpanId(2), 4), Some((vec![2, 3], vec![5.0; 2])));
    state.replace(layers(0, 1), vec![span(3, layers(0, 1))], None);
    run(&mut state, None, 6.0);
    assert_eq!(state.returned_by(SpanId(3), 4), Some((vec![], vec![])));
    run(&mut state, Some((4, 1)), 6.0);
    assert_eq!(state.returned_by(SpanId(3), 5), Some((vec![4], vec![6.0])));
    assert_eq!(state.returned_by(SpanId(2), 5), Some((vec![2, 3, 4], vec![5.0, 5.0, 6.0])));
}
