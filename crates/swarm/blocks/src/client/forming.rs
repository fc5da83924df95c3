//! Opens sessions at the peers of new spans, until a plan works out.

use std::time::Duration;

use directory::{ChainSpan, PeerId, RouteError};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use types::LayerRange;

use super::context::push_key;
use super::link::{OpenedSpan, SpanLoss, SpanSession};
use super::session::{LossKind, Session, SessionLoss};
use super::session_state::{NewSpan, SpanId};
use crate::wire::{FailureKind, Next, Open, PushKey};

/// How long a session looks for a chain.
pub const FORM_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a session that was running looks for peers with room, while other sessions of the client wait for it.
pub(super) const FULL_TIME_MAX: Duration = Duration::from_secs(2);
/// The same for a foreign peer without room, which forgets sessions a minute after their last call.
pub(super) const FOREIGN_FULL_TIME_MAX: Duration = Duration::from_secs(75);
/// How long a check looks for the peers that were chosen for it.
const CHECK_TIME_MAX: Duration = Duration::from_secs(8);
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
/// The same if there are others: it may be stuck. If it is only slow, its turn comes again.
const FOREIGN_WAIT_OF_SEVERAL: Duration = Duration::from_secs(5);
const FOREIGN_WAIT_PER_ROW_OF_SEVERAL: Duration = Duration::from_millis(20);
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
    let started = session.search_since();
    let search = (!session.is_check()).then(|| session.context().search(layers));
    let mut failed = None;
    loop {
        let FailedAttempt { why, is_full, layers: missing } =
            failed.take().unwrap_or_else(|| FailedAttempt { why: String::new(), is_full: false, layers });
        let is_full = is_full || session.is_foreign_full();
        // Chains may have been formed since, and done nothing.
        let max = if session.is_check() { CHECK_TIME_MAX } else { session.search_time_max(is_full) };
        if started.elapsed() > max {
            let why = session.failures_text().unwrap_or(why).into();
            let kind = if is_full { LossKind::NoRoom } else { LossKind::NoChain };
            return Err(SessionLoss { why, kind, layers: missing, since: started });
        }
        let (attempt, has_others) = match session.plan(layers, [before, after]) {
            Ok((spans, is_busy)) => {
                let waits = open_waits(session, &spans, layers, [before, after]);
                match open_all(session, &spans, &waits, before, after).await {
                    Ok(formed) => {
                        session.chain_was_formed();
                        return Ok(formed);
                    }
                    // There may be others.
                    Err(failed) => (failed, !is_busy),
                }
            }
            Err(error) => (FailedAttempt::unplanned(&error, layers), false),
        };
        let told = session.failures_text();
        search.iter().for_each(|search| search.failed(attempt.layers, told.as_ref().unwrap_or(&attempt.why)));
        failed = Some(attempt);
        if !has_others {
            session.context().view.want();
            sleep(RETRY).await;
        }
    }
}

impl FailedAttempt {
    fn unplanned(error: &RouteError, layers: LayerRange) -> Self {
        let missing = match error {
            RouteError::Uncovered { layers } | RouteError::NoRoom { layers, .. } => *layers,
            _ => layers,
        };
        Self { why: error.to_string(), is_full: matches!(error, RouteError::NoRoom { .. }), layers: missing }
    }
}

/// What to expect of the peer of a span.
#[derive(Clone, Copy)]
struct OpenWait {
    /// How long it may take to open a session.
    open: Duration,
    /// Others could run its layers.
    has_other: bool,
}

fn open_waits(
    session: &mut Session,
    spans: &[ChainSpan],
    layers: LayerRange,
    around: [Around<'_>; 2],
) -> Vec<OpenWait> {
    let mut wait = |span: &ChainSpan| match session.has_other(span.peer, layers, around) {
        true => OpenWait { open: OPEN_TIME_MAX_OF_SEVERAL, has_other: true },
        false => OpenWait { open: OPEN_TIME_MAX, has_other: false },
    };
    spans.iter().map(&mut wait).collect()
}

async fn open_all(
    session: &mut Session,
    spans: &[ChainSpan],
    waits: &[OpenWait],
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
    let opening = opening.map(|((id, span, open), wait)| open_span(session, *id, span.peer, open.clone(), wait.open));
    let results = join_all(opening).await;
    let (mut opened, mut new, mut failed) = (Vec::new(), Vec::new(), None);
    // The first new span gets its rows from the one before if that can; it tells when it cannot.
    let mut fed_by = previous.as_ref().map(|next| next.key);
    for (((id, ChainSpan { peer, layers }, open), result), wait) in opens.into_iter().zip(results).zip(waits) {
        match result {
            Ok((span_session, OpenedSpan { rows_max, is_linked, returns_logits })) => {
                let (wait, wait_per_row) = wait_of(session, peer, layers, wait.has_other);
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
                failed = Some(FailedAttempt {
                    why: format!("{}: {loss}", session.context().peer_name(&peer)),
                    is_full,
                    layers,
                });
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
fn wait_of(session: &Session, peer: PeerId, layers: LayerRange, has_other: bool) -> (Duration, Duration) {
    let context = session.context();
    if context.foreign.contains(&peer) {
        return match has_other {
            true => (FOREIGN_WAIT_OF_SEVERAL, FOREIGN_WAIT_PER_ROW_OF_SEVERAL),
            false => (FOREIGN_WAIT, WAIT_MIN / 10),
        };
    }
    let Some(record) = context.view.record(&context.model, &peer) else { return (WAIT_MIN, WAIT_MIN / 10) };
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(WAIT_MIN);
    let fixed = f64::from(record.speed.queue_seconds);
    let per_row = f64::from(record.speed.layer_seconds) * layers.count() as f64;
    (WAIT_MIN + seconds(WAIT_FACTOR * fixed), seconds(WAIT_FACTOR * per_row))
}
