use super::*;

const HIDDEN: usize = 2;
const KEY: PushKey = PushKey([7; 16]);

/// Two spans, of which the first passes its rows on to the second.
fn two_spans() -> SessionState {
    let mut state = SessionState::new(0, HIDDEN, Encoding::F32);
    let span = |id, start, end, fed_by| {
        let layers = LayerRange::new(start, end).unwrap();
        let (wait, wait_per_row) = (Duration::from_secs(3), Duration::ZERO);
        NewSpan { id: SpanId(id), layers, rows_max: 8, fed_by, wait, wait_per_row }
    };
    let spans = vec![span(1, 0, 2, None), span(2, 2, 4, Some(KEY))];
    state.replace(LayerRange::new(0, 4).unwrap(), spans, None);
    state
}

fn add(state: &mut SessionState, position: usize, rows: usize) -> u64 {
    state.add_job(position, Phase::Decode, &vec![1.0; rows * HIDDEN], 1)
}

fn returned(run: u64, rows: usize, passed_on: Option<PushKey>) -> Returned {
    let states = Activations { encoding: Encoding::F32, rows, values: vec![1.0; rows * HIDDEN] };
    Returned { run, passed_on, compute: Duration::ZERO, queued: Duration::ZERO, states }
}

/// The positions of the rows that are to be sent to a span.
fn sent(state: &mut SessionState, to: u64) -> Vec<usize> {
    let actions = state.take_actions().into_iter();
    let positions = actions.filter_map(|action| match action {
        Action::Send { to: span, run } if span == SpanId(to) => Some(run.position),
        _ => None,
    });
    positions.collect()
}

#[test]
fn rows_from_the_client_do_not_overtake_those_that_were_passed_on() {
    let mut state = two_spans();
    let (first, second) = (add(&mut state, 0, 5), add(&mut state, 5, 1));
    assert_eq!(sent(&mut state, 1), [0, 5]);
    state.returned(SpanId(1), returned(first, 5, Some(KEY)));
    state.returned(SpanId(1), returned(second, 1, None));
    assert_eq!(sent(&mut state, 2), [0; 0], "the first rows are on their way");
    state.returned(SpanId(2), returned(first, 1, None));
    assert_eq!(sent(&mut state, 2), [5]);
}

#[test]
fn rows_that_were_passed_on_and_did_not_arrive_are_sent_again_from_the_first_one_on() {
    let mut state = two_spans();
    let (first, second) = (add(&mut state, 0, 5), add(&mut state, 5, 1));
    state.returned(SpanId(1), returned(first, 5, Some(KEY)));
    state.returned(SpanId(1), returned(second, 1, None));
    state.take_actions();
    state.check_deadlines(Instant::now() + Duration::from_secs(4));
    assert_eq!(sent(&mut state, 2), [0, 5]);
}
