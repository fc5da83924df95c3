//! Requests of a rank that a [`Fault`](crate::worker::Fault) may hit. Only in builds with debug assertions.

use std::thread;
use std::time::Instant;

use super::{Process, panic_kind};
use crate::protocol::{ErrorKind, Message as _, Request, WriteError};
use crate::worker::fault::{FaultAction, Point};
use crate::worker::queue::RequestQueue;
use crate::worker::request_error::RequestError;

impl Process {
    /// As [`Process::answer`], but for what goes wrong on purpose.
    pub(super) fn answer_or_fail(&mut self, request: Request, queue: &RequestQueue) -> Result<(), WriteError> {
        let Some((point, action)) = point(&request).and_then(|point| Some((point, self.strike(point)?))) else {
            return self.answer(request, queue);
        };
        let (op, id, kind, begun) = (request.op(), request.id(), panic_kind(&request), Instant::now());
        match action {
            FaultAction::CloseStdout => {
                self.replies.close();
                self.answer(request, queue)
            }
            FaultAction::Oom => {
                // It ends a step like any other error.
                if point == Point::Step {
                    self.link.abandon();
                }
                let message = "not enough memory (a fault that was asked for)";
                self.write(queue, op, id, Err(RequestError::new(ErrorKind::InsufficientMemory, message)))
            }
            FaultAction::Panic => {
                let done = self.guard(kind, |_| panic!("a fault that was asked for"));
                self.write(queue, op, id, done)
            }
            FaultAction::Slow => {
                let done = self.guard(kind, |process| process.handle(request));
                if let Some(fault) = &self.fault {
                    thread::sleep(fault.delay(begun.elapsed()));
                }
                self.write(queue, op, id, done)
            }
            FaultAction::Garbage => {
                let _ = self.guard(kind, |process| process.handle(request));
                self.replies.garble()
            }
            // These have ended or stopped the process; a stopped one may be continued.
            FaultAction::Exit | FaultAction::Kill | FaultAction::Stop => self.answer(request, queue),
        }
    }

    /// A fault where there is nothing to answer.
    pub(super) fn fail_unasked(&mut self, point: Point) -> Result<(), WriteError> {
        match self.strike(point) {
            Some(FaultAction::Garbage) => self.replies.garble(),
            Some(FaultAction::CloseStdout) => {
                self.replies.close();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn strike(&mut self, point: Point) -> Option<FaultAction> {
        self.fault.as_mut()?.strike(self.rank, point)
    }
}

fn point(request: &Request) -> Option<Point> {
    match request {
        Request::Attach { .. } | Request::Join { .. } | Request::Init { .. } => Some(Point::Init),
        Request::Load { .. } | Request::LoadDenseShard { .. } => Some(Point::Load),
        Request::Step { .. } | Request::GenerateStep { .. } => Some(Point::Step),
        Request::UnloadModel { .. } | Request::Shutdown => Some(Point::Unload),
        _ => None,
    }
}
