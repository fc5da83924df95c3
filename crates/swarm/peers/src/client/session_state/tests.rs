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
