//! Opens sessions at the peers of new spans, until a plan works out.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use swarm::{ChainSpan, PeerId, RouteError};
use tokio::time::{sleep, timeout};
use types::LayerRange;

use super::context::push_key;
use super::link::{OpenedSpan, SpanLoss, SpanSession};
use super::session::{Session, SessionLoss};
use super::session_state::{NewSpan, SpanId};
use crate::wire::{FailureKind, Next, Open, PushKey};

/// How long a session looks for a chain.
pub const FORM_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a session that was running looks for peers with room, while other sessions of the client wait for it.
const FULL_TIME_MAX: Duration = Duration::from_secs(2);
/// How long a peer may take to open a session, with the stream to the next peer, if there is no other one.
const OPEN_TIME_MAX: Duration = Duration::from_secs(8);
/// The same if there are others. It may be dead; if it is far away, it is connected when its turn comes again.
const OPEN_TIME_MAX_OF_SEVERAL: Duration = Duration::from_secs(4);
/// After that a session looks again whether there is a chain.
const RETRY: Duration = Duration::from_millis(250);

/// A peer that does not answer for so long, beside the time that its work takes, is lost.
const WAIT_MIN: Duration = Duration::from_secs(3);
/// The same for a peer with another protocol, which may be loading its weights.
const FOREIGN_WAIT: Duration = Duration::from_secs(60);
/// What a run may take, in times of the predicted time.
const WAIT_FACTOR: f64 = 20.0;

/// An open session at a span's peer.
pub(super) struct OpenSpan {
    pub peer: PeerId,
    pub layers: LayerRange,
    pub session: SpanSession,
    pub accepts: Option<PushKey>,
    pub next: Option<Next>,
}

impl OpenSpan {
    /// From now on rows come and go another way.
    pub fn route(&mut self, accepts: Option<PushKey>, next: Option<Next>) {
        self.accepts = accepts;
        self.next = next.clone();
        self.session.route(accepts, next);
    }
}

/// Spans that were opened.
pub(super) struct FormedSpans {
    pub opened: Vec<(SpanId, OpenSpan)>,
    pub new: Vec<NewSpan>,
    /// Where the span before passes its rows on to.
    pub previous: Option<Next>,
    /// With which key the span behind accepts rows.
    pub following: Option<PushKey>,
    /// The same, if the last new span can pass rows on.
    pub after_fed_by: Option<PushKey>,
}

/// Why spans could not be opened.
struct FailedAttempt {
    why: String,
    /// Peers have no room.
    is_full: bool,
    /// Without a peer.
    layers: LayerRange,
}

type Around<'a> = &'a [(SpanId, OpenSpan)];

/// Opens spans for layers between `before` and `after`. Tries other peers until that succeeds, for a limited time.
pub(super) async fn form(
    session: &mut Session,
    layers: LayerRange,
    before: Around<'_>,
    after: Around<'_>,
) -> Result<FormedSpans, SessionLoss> {
    let started = Instant::now();
    let search = (!session.is_check()).then(|| session.context().search(layers));
    loop {
        let mut has_others = false;
        let FailedAttempt { why, is_full, layers: missing } = match session.plan(layers, [before, after]) {
            Ok((spans, is_busy)) => {
                has_others = !is_busy;
                let waits = open_times(session, &spans, layers, [before, after]);
                match open_all(session, &spans, &waits, before, after).await {
                    Ok(formed) => return Ok(formed),
                    Err(failed) => failed,
                }
            }
            Err(error) => FailedAttempt {
                why: error.to_string(),
                is_full: matches!(error, RouteError::NoRoom { .. }),
                layers: match error {
                    RouteError::Uncovered { layers } | RouteError::NoRoom { layers, .. } => layers,
                    _ => layers,
                },
            },
        };
        search.iter().for_each(|search| search.failed(missing, &why));
        // A session that runs makes others wait, which may have what it needs.
        let max = if is_full && session.is_in_the_way() { FULL_TIME_MAX } else { FORM_TIME_MAX };
        if started.elapsed() > max {
            let why = format!("no chain of peers for layers {layers}: {why}").into();
            return Err(SessionLoss { why, is_full, layers: missing, since: started });
        }
        if !has_others {
            session.context().view.want();
            sleep(RETRY).await;
        }
    }
}

fn open_times(
    session: &mut Session,
    spans: &[ChainSpan],
    layers: LayerRange,
    around: [Around<'_>; 2],
) -> Vec<Duration> {
    let mut time = |span: &ChainSpan| match session.has_other(span.peer, layers, around) {
        true => OPEN_TIME_MAX_OF_SEVERAL,
        false => OPEN_TIME_MAX,
    };
    spans.iter().map(&mut time).collect()
}

async fn open_all(
    session: &mut Session,
    spans: &[ChainSpan],
    waits: &[Duration],
    before: Around<'_>,
    after: Around<'_>,
) -> Result<FormedSpans, FailedAttempt> {
    let is_star = session.context().options.is_star;
    // A key for each span that gets its rows from the one before, and one for the span behind the new ones.
    let keys = if is_star { None } else { (0..=spans.len()).map(|_| push_key()).collect::<Option<Vec<_>>>() };
    let key = |index: usize| keys.as_ref().map(|keys| keys[index]);
    let next_of = |peer: PeerId, key: PushKey| Next { peer, key, addresses: session.context().dial.addresses(peer) };
    let mut opens = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        let following = spans.get(index + 1).map(|next| next.peer).or(after.first().map(|(_, span)| span.peer));
        let is_ours = |peer: &PeerId| !session.context().foreign.contains(peer);
        let following = following.filter(|peer| is_ours(peer) && session.may_feed(&span.peer) && is_ours(&span.peer));
        let next = following.zip(key(index + 1)).map(|(peer, key)| next_of(peer, key));
        let is_first = index == 0 && before.is_empty();
        let open = Open {
            session: 0,
            model: session.context().model,
            layers: span.layers,
            is_last: span.layers.end() == session.end(),
            tokens_max: session.tokens_max(),
            accepts: key(index).filter(|_| !is_first),
            next,
        };
        opens.push((session.context().span_id(), *span, open));
    }
    // Peers with other protocols neither pass rows on nor get them passed on.
    let is_foreign = |peer: Option<PeerId>| peer.is_some_and(|peer| session.context().foreign.contains(&peer));
    let ends = [before.last().map(|(_, span)| span.peer), spans.first().map(|span| span.peer)];
    let may_feed = before.last().is_some_and(|(_, span)| session.may_feed(&span.peer));
    let previous = (may_feed && !ends.into_iter().any(is_foreign))
        .then(|| key(0))
        .flatten()
        .map(|key| next_of(spans[0].peer, key));
    let following = (!after.is_empty()).then(|| key(spans.len())).flatten();

    let opening = opens.iter().zip(waits);
    let opening = opening.map(|((id, span, open), wait)| open_span(session, *id, span.peer, open.clone(), *wait));
    let results = join_all(opening).await;
    let (mut opened, mut new, mut failed) = (Vec::new(), Vec::new(), None);
    // The first new span gets its rows from the one before if that can; it tells when it cannot.
    let mut fed_by = previous.as_ref().map(|next| next.key);
    for ((id, ChainSpan { peer, layers }, open), result) in opens.into_iter().zip(results) {
        match result {
            Ok((span_session, OpenedSpan { rows_max, is_linked, returns_logits })) => {
                let (wait, wait_per_row) = wait_of(session, peer, layers);
                // What comes back has to fit into a frame.
                let rows_max = rows_max.min(session.context().rows_max);
                new.push(NewSpan { id, layers, rows_max, returns_logits, fed_by, wait, wait_per_row });
                let Open { accepts, next, .. } = open;
                let next = next.filter(|_| is_linked);
                fed_by = next.as_ref().map(|next| next.key);
                opened.push((id, OpenSpan { peer, layers, session: span_session, accepts, next }));
            }
            Err(loss) => {
                let is_full = matches!(loss, SpanLoss::Failed { kind: FailureKind::Refused, .. });
                failed =
                    Some(FailedAttempt { why: format!("peer {}: {loss}", p2p::peer_text(&peer)), is_full, layers });
                session.avoid(peer, &loss);
            }
        }
    }
    match failed {
        Some(failed) => Err(failed),
        None => Ok(FormedSpans { opened, new, previous, following, after_fed_by: fed_by }),
    }
}

async fn open_span(
    session: &Session,
    id: SpanId,
    peer: PeerId,
    open: Open,
    wait: Duration,
) -> Result<(SpanSession, OpenedSpan), SpanLoss> {
    let context = session.context();
    if let Some(foreign) = context.foreign.get(&peer, open.layers) {
        let returns_logits = foreign.returns_logits();
        let opened = OpenedSpan { rows_max: context.rows_max, is_linked: false, returns_logits };
        return Ok((SpanSession::foreign(&*foreign, id, open.is_last, session.events()), opened));
    }
    let link = context.link(peer);
    let opened = timeout(wait, link.open(id, open, session.events())).await.map_err(|_| SpanLoss::Late)??;
    if let Some(time) = link.round_trip() {
        context.view.set_round_trip(peer, time);
    }
    if opened.1.rows_max < context.rows_max {
        let why = format!("it runs {} rows at once, {} are needed", opened.1.rows_max, context.rows_max);
        return Err(SpanLoss::Failed { kind: FailureKind::Refused, why });
    }
    Ok(opened)
}

/// How long a run may take: a fixed part, and one for each row.
fn wait_of(session: &Session, peer: PeerId, layers: LayerRange) -> (Duration, Duration) {
    let context = session.context();
    if context.foreign.contains(&peer) {
        return (FOREIGN_WAIT, WAIT_MIN / 10);
    }
    let Some(record) = context.view.record(&context.model, &peer) else { return (WAIT_MIN, WAIT_MIN / 10) };
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(WAIT_MIN);
    let fixed = f64::from(record.speed.queue_seconds);
    let per_row = f64::from(record.speed.layer_seconds) * layers.count() as f64;
    (WAIT_MIN + seconds(WAIT_FACTOR * fixed), seconds(WAIT_FACTOR * per_row))
}
