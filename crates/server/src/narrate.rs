//! How an API tells an answer: event by event as it comes, or whole when it has ended.

use futures_util::{Stream, StreamExt, stream};

use crate::answer::{Answer, Part, Usage};
use crate::error::ApiError;
use crate::sse;

/// Turns the parts of an answer into the events of one API, and remembers what the whole is made of.
pub trait Narrator {
    type Event;

    /// Before anything is computed.
    fn begin(&mut self, say: &mut dyn FnMut(Self::Event));

    /// The next part of the answer. `usage` is what was used so far.
    fn tell(&mut self, part: Part, usage: Usage, say: &mut dyn FnMut(Self::Event));

    /// There will be no further part.
    fn fail(&mut self, error: ApiError, say: &mut dyn FnMut(Self::Event));

    fn write(event: &Self::Event) -> sse::Event;
}

/// The answer as events. Dropping the stream cancels the answer.
pub fn events<N>(answer: Answer, mut narrator: N) -> impl Stream<Item = sse::Event> + Send
where
    N: Narrator + Send + 'static,
{
    let mut first = Vec::new();
    narrator.begin(&mut |event| first.push(N::write(&event)));
    let rest = stream::unfold(Some((answer, narrator)), |told| async move {
        let (mut answer, mut narrator) = told?;
        let part = answer.next().await?;
        let mut said = Vec::new();
        let mut say = |event| said.push(N::write(&event));
        let told = match part {
            Ok((_, part)) => {
                narrator.tell(part, answer.usage(), &mut say);
                Some((answer, narrator))
            }
            Err(error) => {
                narrator.fail(error, &mut say);
                None
            }
        };
        Some((stream::iter(said), told))
    });
    stream::iter(first).chain(rest.flatten())
}

/// Listens to the end; the narrator then knows the whole.
pub async fn whole<N: Narrator>(mut answer: Answer, mut narrator: N) -> Result<N, ApiError> {
    narrator.begin(&mut |_| {});
    while let Some(part) = answer.next().await {
        narrator.tell(part?.1, answer.usage(), &mut |_| {});
    }
    Ok(narrator)
}
