//! What a session makes of replies, without any network.

use directory::ModelDigest;
use engine::Phase;
use tokio::sync::mpsc::UnboundedReceiver;

use super::super::context::ClientOptions;
use super::super::foreign::{ForeignPeer, ForeignPeers, ForeignTask};
use super::super::job::JobResult;
use super::super::link::SpanSession;
use super::super::session_state::NewSpan;
use super::*;
use crate::dial::{Dial, DialError, Dialled};
use crate::view::SwarmView;
use crate::wire::{Activations, Encoding, Run};

const HIDDEN: usize = 2;
const HOUR: Duration = Duration::from_secs(3600);

struct NoNetwork;

impl Dial for NoNetwork {
    fn open<'a>(&'a self, _: PeerId, _: &'a [String], _: &'static str) -> Dialled<'a> {
        Box::pin(async { Err(DialError("there is no network".to_owned())) })
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

/// A peer that takes runs and never answers.
struct Stuck;

impl ForeignPeer for Stuck {
    fn layers(&self) -> LayerRange {
        layers()
    }

    fn returns_logits(&self) -> bool {
        false
    }

    fn session(&self, _: bool, runs: UnboundedReceiver<Run>, _: mpsc::UnboundedSender<Returned>) -> ForeignTask {
        Box::pin(async move {
            let _runs = runs;
            std::future::pending().await
        })
    }
}

fn layers() -> LayerRange {
    LayerRange::new(0, 2).unwrap()
}

fn peer() -> PeerId {
    PeerId::new(b"peer").unwrap()
}

/// A session with a chain of one peer, which owes the reply to a run of one row.
struct Waiting {
    session: Session,
    events: UnboundedReceiver<(SpanId, SpanEvent)>,
    lost: VecDeque<(SpanId, SpanLoss)>,
    result: sync::Receiver<JobResult>,
}

const SPAN: SpanId = SpanId(1);

impl Waiting {
    fn new() -> Self {
        let (view, options) = (Arc::<SwarmView>::default(), ClientOptions::default());
        let shape = [layers().end(), HIDDEN, 3, 8];
        let model = ModelDigest([1; 32]);
        let context = ClientContext::new(Arc::new(NoNetwork), view, model, shape, options, ForeignPeers::default());
        let (sender, events) = mpsc::unbounded_channel();
        let part =
            CheckedPart { range: layers(), outer: [Vec::new(), Vec::new()], excluded: HashSet::new(), used: None };
        let mut session = Session::new(Arc::new(context), 8, part, sender);
        let wait = Duration::from_secs(3);
        let (returns_logits, fed_by) = (false, None);
        let new = NewSpan { id: SPAN, layers: layers(), rows_max: 8, returns_logits, fed_by, wait, wait_per_row: wait };
        session.state.replace(layers(), vec![new], None);
        let stuck = SpanSession::foreign(&Stuck, SPAN, true, session.events());
        session
            .spans
            .push((SPAN, OpenSpan { peer: peer(), layers: layers(), session: stuck, accepts: None, next: None }));
        let (reply, result) = JobReply::new(None);
        let (rows, takes_logits) = (vec![1.0; HIDDEN], false);
        session.add(Job { position: 0, phase: Phase::Decode, rows, state_rows: 1, takes_logits, reply });
        let mut lost = VecDeque::new();
        assert!(session.act(&mut lost).is_none() && lost.is_empty());
        Self { session, events, lost, result }
    }

    /// The reply to the run, which says that it took so long.
    fn reply(&self, compute: Duration) {
        let states = Activations { encoding: Encoding::F32, rows: 1, values: vec![2.0; HIDDEN] };
        // The job has number 1, the run number 2.
        let returned = Returned { run: 2, passed_on: None, compute, queued: Duration::ZERO, states };
        self.session.events().send((SPAN, SpanEvent::Returned(returned))).unwrap();
    }

    fn tick(&mut self, after: Duration, stood: Duration) {
        self.session.tick(Instant::now() + after, stood, &mut self.events, &mut self.lost);
        assert!(self.session.act(&mut self.lost).is_none());
    }
}

#[tokio::test]
async fn a_reply_that_has_come_is_never_late() {
    let mut waiting = Waiting::new();
    waiting.reply(Duration::ZERO);
    waiting.tick(HOUR, Duration::ZERO);
    assert!(waiting.lost.is_empty(), "{:?}", waiting.lost);
    assert_eq!(waiting.result.try_recv().unwrap().unwrap(), JobOutput::States(vec![2.0; HIDDEN]));
}

#[tokio::test]
async fn a_peer_that_owes_a_reply_for_long_is_lost() {
    let mut waiting = Waiting::new();
    waiting.tick(HOUR, Duration::ZERO);
    assert_eq!(waiting.lost, [(SPAN, SpanLoss::Late)]);
}

#[tokio::test]
async fn nobody_is_late_because_this_process_stood_still() {
    let mut waiting = Waiting::new();
    waiting.tick(HOUR, HOUR);
    assert!(waiting.lost.is_empty(), "{:?}", waiting.lost);
}

/// A peer that says that it took no time would be in every chain.
#[tokio::test]
async fn how_fast_a_peer_is_is_measured_here() {
    let mut waiting = Waiting::new();
    waiting.reply(2 * HOUR);
    waiting.tick(Duration::ZERO, Duration::ZERO);
    let time = waiting.session.context.view.layer_time(&peer()).unwrap();
    assert!(time > Duration::ZERO && time < HOUR / 2, "{time:?}");
}

#[tokio::test]
async fn a_peer_that_takes_sessions_and_does_nothing_does_not_begin_the_search_again() {
    let mut waiting = Waiting::new();
    let search = |waiting: &mut Waiting| {
        waiting.session.lose(SPAN, &SpanLoss::Late).unwrap();
        let since = waiting.session.search_since();
        waiting.session.chain_was_formed();
        assert!(waiting.session.search.is_some(), "what was formed has to do something");
        since
    };
    let since = search(&mut waiting);
    assert_eq!(waiting.session.search_since(), since);
    let text = waiting.session.failures_text().unwrap();
    assert!(text.contains("did not answer in time") && text.contains(&libp2p_node::peer_text(&peer())), "{text}");
    // Another one that works ends it.
    let mut waiting = Waiting::new();
    waiting.session.note_failure(peer(), &SpanLoss::Late, Instant::now());
    waiting.reply(Duration::ZERO);
    waiting.tick(Duration::ZERO, Duration::ZERO);
    assert!(waiting.session.search.is_none());
}
