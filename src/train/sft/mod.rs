//! The supervised warm start: conversations in, a Hugging Face model folder out.
//!
//! Invariants:
//! - Weight 1 falls exactly on what the policy itself would sample: each assistant turn from after the
//!   generation prompt to its end token, that token included. All other tokens, the template's own text after a turn
//!   among them, have the prompt's weight.
//! - A conversation whose template rewrites history is refused by line: its turns could not be trained as sampled.
//! - Same data, options and seed: same weights to the bit, at any number of threads and any microbatch size.

mod batches;
mod conversations;
mod folder;
mod run;
mod tokenizer;

pub use conversations::{Conversation, EncodedConversation, encode, encode_all, read_conversations};
pub use folder::{SourceFolder, write_folder};
pub use run::{SftMetrics, SftOptions, SupervisedTrainer};
pub use tokenizer::{TokenizerSpec, train_tokenizer};
