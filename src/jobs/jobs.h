// Jobs that need no folder of their own, and what all jobs' decks have.
#pragma once

#include "config/command.h"

namespace weft {

// Registers every table of the deck that a model or a job owns with the parser. The program calls
// this first; tests that read decks must call it themselves.
void register_deck_tables();

// `weft train DECK`: until train.steps, going on from RUN/latest if there is one (unless run.resume
// is false). 0 when done, 75 when it was asked to stop and has saved.
Command train_command();
// Before a training opens its data (stage.cpp). Collective: with data.stage, the first rank of
// every node copies the stores of data.path and validation.path (data/stage.h), and from then on
// all ranks read the copies; not if the run has all of its steps. Throws on every rank what
// stage_stores() throws on one, and Exit::hardware where the copies of nodes differ. Logs time and
// rate. False on all ranks once a signal has asked any of them to stop: the job ends with 75, and
// RUN/stopped_while_staging tells a job script that training had not begun.
bool stage_data(const Deck& deck, MPI_Comm world);
// `weft export RUN OUT.safetensors`: a run's weights under the released names, for the original
// PyTorch code.
Command export_command();
// `weft inspect PATH`: what a clip store, a checkpoint, a safetensors file or a list of pictures
// with text holds, verified: every hash there is gets checked. Exit::data for a broken file,
// Exit::checkpoint for a broken checkpoint.
Command inspect_command();
// `weft text DECK FILE`: the captions of a text file through cleaning, tokenizer and T5 encoder, as
// far as is asked. Collective if features are requested: all ranks then share the encoder.
Command text_command();

}  // namespace weft
