# Answers with zsh's completions: zsh -f complete.zsh SCRIPT FOLDER. For every line on standard
# input: reads the command line from FOLDER/query, and writes the completions at its end to
# FOLDER/answer.
zmodload zsh/zpty
script=$1 folder=$2

zpty shell zsh -f -i
read -r -d '' setup <<END
unsetopt beep; PROMPT= RPROMPT= LISTMAX=10000
autoload -U compinit; compinit -u -D
source ${(q)script}
compadd() {
  if [[ "\${@[1,(i)(-|--)]} " == *' '-[a-zA-Z]#[OAD]' '* || "\$1" == -[OAD] ]]; then
    builtin compadd "\$@"
    return
  fi
  local -a offered
  builtin compadd -A offered "\$@"
  print -rl -- \$offered >>${(q)folder}/answer.part
  builtin compadd "\$@"
}
_offer() {
  _main_complete
  compstate[insert]= compstate[list]=
}
zle -C offer complete-word _offer
answer() {
  : >${(q)folder}/answer.part
  BUFFER=\$(<${(q)folder}/query)
  CURSOR=\$#BUFFER
  zle offer
  BUFFER=
  mv ${(q)folder}/answer.part ${(q)folder}/answer
}
zle -N answer
bindkey '^T' answer
print -r READY >${(q)folder}/answer
END
print -r -- $setup >$folder/setup.zsh
zpty -w shell "source ${(q)folder}/setup.zsh"
while IFS= read -r line; do
  zpty -w -n shell $'\C-t'
  # The terminal's output is ignored, but its buffer must not fill up.
  while zpty -r -t shell shown; do :; done
done
zpty -d shell
